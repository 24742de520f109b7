"""A verdict on a plan in one sentence, what to change first if it does not fit, and what is fastest. No torch."""

from collections.abc import Iterator
from dataclasses import replace

from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.quantities import format_bytes

MOST_CHANGES = 6
MOST_RANKS = 4096
MOST_DOUBLINGS = 12  # of the batch, in the search for the fastest plan
AS_FAST = 0.02  # plans whose speeds differ by less are as fast as each other
BEYOND = "take larger devices, or split layers as well (tensor parallelism: notebook 08 shows it, this plan cannot)"


def verdict(plan: Plan, subject: Subject) -> str:
    """Say in one sentence how much memory a plan leaves or, if it does not fit, what to change first."""
    device = f"the {format_bytes(round(plan.cluster.device_memory_bytes))} of a device"
    needs = (
        f"the peak of {format_bytes(plan.peak.bytes)} and {format_bytes(round(plan.cluster.allowance_bytes))} outside "
        "the count"
    )
    host = _host_sentence(plan)
    if plan.fits:
        return f"It fits: {needs} leave {format_bytes(round(plan.spare_bytes))} free of {device}{host}."
    advice = _advice(changes_until_it_fits(plan, subject))
    if plan.spare_bytes >= 0:
        return f"It does not fit: a device has room{host}; {advice}."
    largest, size = max(plan.by_category().items(), key=lambda entry: entry[1])
    return (
        f"It does not fit: {needs} are {format_bytes(-round(plan.spare_bytes))} more than {device}, and the largest "
        f"part is {largest} with {format_bytes(size)}; {advice}."
    )


def _host_sentence(plan: Plan) -> str:
    """Say what offloading asks of the host, which a device's memory does not show."""
    if not plan.host_bytes:
        return ""
    ranks = plan.cluster.node_ranks
    keeper = f"a node of {ranks} ranks" if ranks > 1 else "each rank"
    needs = f", and {keeper} keeps {format_bytes(plan.node_host_bytes)} in host memory"
    if plan.fits_host:
        return needs
    return f"{needs}, more than a node's {format_bytes(round(plan.cluster.host_memory_bytes))}"


def _advice(changes: list[tuple[str, Plan]]) -> str:
    """List the changes in order, with the peak after each."""
    steps = [f"{text} (peak {format_bytes(plan.peak.bytes)})" for text, plan in changes]
    if not steps:
        return f"no single change brings it down: {BEYOND}"
    ending = ", and it fits" if changes[-1][1].fits else f", which is still too much: {BEYOND}"
    return f"first {', then '.join(steps)}{ending}{_host_sentence(changes[-1][1]) if changes[-1][1].fits else ''}"


def changes_until_it_fits(plan: Plan, subject: Subject) -> list[tuple[str, Plan]]:
    """List the changes one after the other, each with the plan it leads to.

    Of changes after which it fits, the first in the order of `possible_changes` is taken, which is that of what they
    cost; where none does, the one that brings most, and so on.
    """
    taken: list[tuple[str, Plan]] = []
    while not plan.fits and len(taken) < MOST_CHANGES:
        found = [(text, changed) for text, changed in possible_changes(plan, subject) if _is_better(changed, plan)]
        if not found:
            break
        fitting = [change for change in found if change[1].fits]
        taken.append(fitting[0] if fitting else min(found, key=lambda change: change[1].peak.bytes))
        plan = taken[-1][1]
    return taken


def _is_better(changed: Plan, plan: Plan) -> bool:
    if not plan.fits_host:
        return changed.node_host_bytes < plan.node_host_bytes
    return changed.peak.bytes < plan.peak.bytes and changed.fits_host


def possible_changes(plan: Plan, subject: Subject) -> Iterator[tuple[str, Plan]]:
    """Every single change that is left, in the order of what it costs.

    A cut costs latency, bf16 precision where it does not matter, recomputing a third more arithmetic, a smaller batch
    gathers more often for the same number of items, ranks cost money, and offloading waits for the host in every step.
    """
    settings, cluster = plan.settings, plan.cluster
    sharded = settings.config().is_sharded
    ranks = cluster.world_size

    def planned(text: str, world_size: int = ranks, **changes) -> tuple[str, Plan]:
        changed = replace(settings, **changes)
        return text, make_plan(subject, changed, replace(cluster, world_size=world_size))

    if not sharded:
        more = max(2, ranks)
        where = "" if ranks > 1 else f" over {more} ranks"
        flags = "--strategy fsdp-auto-wrap" + ("" if ranks > 1 else f" --world-size {more}")
        yield planned(f"shard it{where}, a unit for each block ({flags})", more, strategy="fsdp-auto-wrap")
    if settings.strategy == "fsdp" and subject.units:
        yield planned("cut it at the blocks (--strategy fsdp-auto-wrap)", strategy="fsdp-auto-wrap")
    if settings.precision == "fp32" and subject.refused("bf16") is None and plan.can_compute("bf16"):
        text = "gather and compute in bf16 (--precision bf16)" if sharded else "compute in bf16 (--precision bf16)"
        yield planned(text, precision="bf16")
    if sharded and settings.sharding != "full":
        yield planned("shard everything over all ranks (--sharding full)", sharding="full")
    if settings.activation_checkpointing != "units" and subject.units:
        text = "recompute each block in backward (--activation-checkpointing units)"
        yield planned(text, activation_checkpointing="units")
    if (sequences := settings.batch // subject.sequence) > 1:
        half = sequences // 2 * subject.sequence
        yield planned(f"halve a rank's batch to {half:,} {subject.item}(s)", batch=half)
    if sharded and ranks * 2 <= MOST_RANKS:
        yield planned(f"take {ranks * 2:,} ranks (--world-size {ranks * 2})", ranks * 2)
    if sharded and settings.strategy != "fsdp-offload":
        yield planned("keep shards in host memory (--strategy fsdp-offload)", strategy="fsdp-offload")


def fastest(plan: Plan, subject: Subject) -> Plan | None:
    """Return the plan with most items per second on the same cluster, in the same precision; None if no rate is known.

    Tried are one sequence, then twice as many until it does not fit, with nothing, products or only inputs kept, and
    sharded over all ranks or within a node. Of plans that are as fast as each other, the one with the lowest peak.
    """
    if plan.time is None:
        return None
    found = [
        planned for settings in _tried(plan, subject) for planned in _while_it_fits(settings, subject, plan.cluster)
    ]
    if not found:
        return None
    best = max(planned.items_per_s_estimate for planned in found)
    as_fast = [planned for planned in found if planned.items_per_s_estimate > (1 - AS_FAST) * best]
    return min(as_fast, key=lambda planned: planned.peak.bytes)


def _tried(plan: Plan, subject: Subject) -> Iterator[Settings]:
    """Yield settings with the smallest batch."""
    smallest = replace(plan.settings, batch=subject.sequence)
    levels = ("none", "selective", "units") if subject.units else ("none",)
    nodes = plan.cluster.world_size // plan.cluster.ranks_per_node
    shardings = [{}]
    if plan.settings.config().is_sharded and nodes > 1 and plan.cluster.ranks_per_node > 1:
        shardings = [{"sharding": "full"}, {"sharding": "hybrid", "replicas": nodes}]
    for level in levels:
        for sharding in shardings:
            yield replace(smallest, activation_checkpointing=level, **sharding)


def _while_it_fits(settings: Settings, subject: Subject, cluster: Cluster) -> Iterator[Plan]:
    for _ in range(MOST_DOUBLINGS):
        planned = make_plan(subject, settings, cluster)
        if not planned.fits:
            return
        yield planned
        settings = replace(settings, batch=2 * settings.batch)
