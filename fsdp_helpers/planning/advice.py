"""State whether a plan fits, find changes that make it fit, and find the fastest plan. No torch import."""

from collections.abc import Iterator
from dataclasses import replace

from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.quantities import format_bytes, format_count

MOST_CHANGES = 6
MOST_RANKS = 4096
MOST_DOUBLINGS = 12  # of the batch, in the search for the fastest plan
FEWEST_CHUNKS, MOST_CHUNKS = 8, 64  # of the loss, that we suggest
AS_FAST = 0.02  # plans whose speeds differ by less than this count as equally fast
# Notebook 15 shows each of these ways to go beyond FSDP; the planner can't plan them.
BEYOND = {
    "activations": "split sequences or layers across ranks (context or tensor parallelism)",
    "unsharded units": "split layers or spread experts across ranks (tensor or expert parallelism)",
    "communication buffers": "split layers or spread experts across ranks (tensor or expert parallelism)",
}
STATE_BEYOND = "use larger devices, or give ranks different layers (pipeline parallelism)"
CHAPTER = "FSDP alone can't do that: notebook 15, 15_more_dimensions.ipynb"


def verdict(plan: Plan, subject: Subject) -> str:
    """Return a sentence saying how much memory a plan leaves free or, if it doesn't fit, what to change."""
    return sentence(plan, [] if plan.fits else changes_until_it_fits(plan, subject))


def sentence(plan: Plan, changes: list[tuple[str, Plan]]) -> str:
    """Return a sentence saying whether the plan fits and, if it doesn't, which changes make it fit."""
    device = f"a device's {format_bytes(round(plan.cluster.device_memory_bytes))}"
    needs = (
        f"the peak of {format_bytes(plan.peak.bytes)} and the allowance of "
        f"{format_bytes(round(plan.cluster.allowance_bytes))}"
    )
    host = _host_sentence(plan)
    if plan.fits:
        return f"It fits: {needs} leave {format_bytes(round(plan.spare_bytes))} of {device} free{host}."
    advice = _advice(plan, changes)
    if plan.spare_bytes >= 0:
        return f"It doesn't fit: a device has room{host}; {advice}."
    largest, size = _largest_part(plan)
    return (
        f"It doesn't fit: {needs} exceed {device} by {format_bytes(-round(plan.spare_bytes))}, and the largest part is "
        f"{largest}, {format_bytes(size)}; {advice}."
    )


def _largest_part(plan: Plan) -> tuple[str, int]:
    return max(plan.by_category().items(), key=lambda entry: entry[1])


def _host_sentence(plan: Plan) -> str:
    """Return a clause about the host memory that offloading uses, or "" if nothing is offloaded."""
    if not plan.host_bytes:
        return ""
    ranks = plan.cluster.node_ranks
    keeper = f"a node of {ranks} ranks" if ranks > 1 else "each rank"
    needs = f"{keeper} keeps {format_bytes(plan.node_host_bytes)} in host memory"
    if plan.fits_host:
        return f", and {needs}"
    return f", but {needs}, more than a node's {format_bytes(round(plan.cluster.host_memory_bytes))}"


def _advice(plan: Plan, changes: list[tuple[str, Plan]]) -> str:
    """Return text listing the changes in order, with the peak after each, and what to do if they aren't enough."""
    last = changes[-1][1] if changes else plan
    steps = [f"{text} (peak {format_bytes(plan.peak.bytes)})" for text, plan in changes]
    if last.fits:
        return f"first {', then '.join(steps)}; then it fits{_host_sentence(last)}"
    beyond = f"{BEYOND.get(_largest_part(last)[0], STATE_BEYOND)}; {CHAPTER}"
    if not steps:
        return f"no single change helps, so {beyond}"
    return f"first {', then '.join(steps)}; that's still too much, so {beyond}"


def changes_until_it_fits(plan: Plan, subject: Subject) -> list[tuple[str, Plan]]:
    """Return the changes to make, in order, each with the resulting plan.

    If any single change makes the plan fit, we choose the cheapest such change: the first one in `possible_changes`.
    Otherwise, we choose the change that saves the most memory, and continue from there.
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
    """Yield each change that's still possible, with the resulting plan, cheapest first.

    Each has a cost: more units add latency; reducing after every micro-batch sends more data; bf16 loses some precision
    where it matters little; a chunked loss computes the head's forward pass twice; recomputation takes a third
    more arithmetic; a smaller batch needs more all-gathers for the same number of items; 8-bit moments need an extra
    library; more ranks cost money; pure bf16 loses small updates; and with offloading, every step waits for the host.
    """
    settings, cluster = plan.settings, plan.cluster
    sharded = settings.config().is_sharded
    ranks = cluster.world_size

    def planned(text: str, world_size: int = ranks, **changes) -> tuple[str, Plan]:
        changed = replace(settings, **changes)
        return text, make_plan(subject, changed, replace(cluster, world_size=world_size))

    if not sharded:
        more = max(2, ranks)
        where = "" if ranks > 1 else f" across {more} ranks"
        flags = "--strategy fsdp-auto-wrap" + ("" if ranks > 1 else f" --world-size {more}")
        yield planned(f"shard it{where}, with each block as a unit ({flags})", more, strategy="fsdp-auto-wrap")
    if settings.strategy == "fsdp" and subject.units:
        yield planned("make each block a unit (--strategy fsdp-auto-wrap)", strategy="fsdp-auto-wrap")
    if sharded and settings.micro_batches > 1 and settings.sync_micro_batches is False:
        text = "reduce gradients after every micro-batch (without --no-sync-micro-batches)"
        yield planned(text, sync_micro_batches=None)
    if settings.precision == "fp32" and subject.refused("bf16") is None and plan.can_compute("bf16"):
        text = "all-gather and compute in bf16 (--precision bf16)" if sharded else "compute in bf16 (--precision bf16)"
        yield planned(text, precision="bf16")
    if sharded and settings.sharding != "full":
        yield planned("shard everything across all ranks (--sharding full)", sharding="full")
    if subject.chunks_loss and settings.loss_chunks < MOST_CHUNKS:
        chunks = max(FEWEST_CHUNKS, 2 * settings.loss_chunks)
        yield planned(f"compute the loss in {chunks} chunks (--loss-chunks {chunks})", loss_chunks=chunks)
    if settings.activation_checkpointing != "units" and subject.units:
        text = "recompute each block in backward (--activation-checkpointing units)"
        yield planned(text, activation_checkpointing="units")
    if (sequences := settings.batch // subject.sequence) > 1:
        half = sequences // 2 * subject.sequence
        text = f"halve a rank's batch to {format_count(half, subject.item)} (--{subject.item}s {half})"
        yield planned(text, batch=half)
    if settings.optimizer.startswith("adam") and settings.optimizer != "adam-8bit":
        yield planned("use 8-bit moments for Adam (--optimizer adam-8bit)", optimizer="adam-8bit")
    if sharded and ranks * 2 <= MOST_RANKS:
        yield planned(f"use {ranks * 2:,} ranks (--world-size {ranks * 2})", ranks * 2)
    if settings.precision == "bf16" and plan.can_compute("bf16"):
        text = "keep everything in bf16, which loses small updates unless they're rounded stochastically"
        yield planned(f"{text} (--precision pure-bf16)", precision="pure-bf16")
    if sharded and settings.strategy != "fsdp-offload":
        yield planned("keep shards in host memory (--strategy fsdp-offload)", strategy="fsdp-offload")


def reducing_once(plan: Plan, subject: Subject) -> Plan | None:
    """Return the plan with gradients reduced only after the last micro-batch, or None if that changes nothing."""
    if plan.settings.micro_batches == 1 or not plan.settings.config().reduces_every_part:
        return None
    return make_plan(subject, replace(plan.settings, sync_micro_batches=False), plan.cluster)


def fastest(plan: Plan, subject: Subject) -> Plan | None:
    """Return the fastest plan that fits on the same cluster in the same precision, or None if no plan fits.

    Also returns None if no rate is known. The search starts with one sequence per rank and doubles the batch until the
    plan no longer fits. This is repeated for each recomputation setting, and for sharding across all ranks or within
    each node. If several plans are equally fast, the one with the lowest peak wins.
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
    """Yield the settings to try, each with the smallest batch: one sequence."""
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
