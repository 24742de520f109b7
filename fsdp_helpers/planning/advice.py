"""Whether a plan fits, in a sentence, and what to change first where it does not. No torch."""

from collections.abc import Iterator
from dataclasses import replace

from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.plan import Plan, make_plan
from fsdp_helpers.quantities import format_bytes

MOST_CHANGES = 6
MOST_RANKS = 4096


def verdict(plan: Plan, subject: Subject) -> str:
    """Say in one sentence how much memory a plan leaves or, if it does not fit, what to change first."""
    device = f"the {format_bytes(round(plan.cluster.device_memory_bytes))} of a device"
    needs = (
        f"the peak of {format_bytes(plan.peak.bytes)} and {format_bytes(round(plan.cluster.allowance_bytes))} outside "
        "the count"
    )
    if plan.fits:
        return f"It fits: {needs} leave {format_bytes(round(plan.spare_bytes))} free of {device}."
    largest, size = max(plan.by_category().items(), key=lambda entry: entry[1])
    return (
        f"It does not fit: {needs} are {format_bytes(-round(plan.spare_bytes))} more than {device}, and the largest "
        f"part is {largest} with {format_bytes(size)}; {_advice(changes_until_it_fits(plan, subject))}."
    )


def _advice(changes: list[tuple[str, Plan]]) -> str:
    """What to change, in order, with the peak that each change leads to."""
    steps = [f"{text} (peak {format_bytes(plan.peak.bytes)})" for text, plan in changes]
    if not steps:
        return "nothing that the planner knows brings it down: take larger devices, or tensor parallelism"
    ending = "" if changes[-1][1].fits else ", which is still too much: take larger devices, or tensor parallelism"
    return f"first {', then '.join(steps)}{ending}" if ending else f"first {', then '.join(steps)}, and it fits"


def changes_until_it_fits(plan: Plan, subject: Subject) -> list[tuple[str, Plan]]:
    """What to change, one thing after the other, each with the plan that it leads to.

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
    return changed.peak.bytes < plan.peak.bytes


def possible_changes(plan: Plan, subject: Subject) -> Iterator[tuple[str, Plan]]:
    """Every single change that there is left, what costs least first."""
    settings, cluster = plan.settings, plan.cluster
    sharded = settings.config().is_sharded

    def planned(text: str, ranks: int = cluster.world_size, **changes) -> tuple[str, Plan]:
        changed = replace(settings, **changes)
        return text, make_plan(subject, changed, replace(cluster, world_size=ranks))

    if not sharded and cluster.world_size > 1:
        yield planned("shard it, a unit for each block (--strategy fsdp-auto-wrap)", strategy="fsdp-auto-wrap")
    if settings.strategy == "fsdp":
        yield planned("cut it at the blocks (--strategy fsdp-auto-wrap)", strategy="fsdp-auto-wrap")
    if sharded and settings.precision == "fp32":
        yield planned("gather and compute in bf16 (--precision bf16)", precision="bf16")
    if sharded and settings.sharding != "full":
        yield planned("shard everything over all ranks (--sharding full)", sharding="full")
    if settings.activation_checkpointing != "units":
        text = "recompute each block in backward (--activation-checkpointing units)"
        yield planned(text, activation_checkpointing="units")
    if settings.batch > 1:
        half = settings.batch // 2
        yield planned(f"halve a rank's batch to {half:,} {subject.item}(s)", batch=half)
    if sharded and cluster.world_size * 2 <= MOST_RANKS:
        ranks = cluster.world_size * 2
        yield planned(f"take {ranks:,} ranks (--world-size {ranks})", ranks=ranks)
    if sharded and settings.strategy != "fsdp-offload":
        yield planned("keep slices in host memory (--strategy fsdp-offload)", strategy="fsdp-offload")
