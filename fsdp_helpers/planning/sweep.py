"""Compare plans across ranks, sequence lengths and memory levers, and find the fewest devices that finish in time.

No torch import.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from fsdp_helpers.planning.advice import FEWEST_CHUNKS, fastest
from fsdp_helpers.planning.costs import device_hours
from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan

DAY_HOURS = 24
CONTEXTS = (2048, 8192, 32768)  # the sequence lengths to try, in tokens, unless --context gives one
FEWEST_RANKS = 8
ClusterOf = Callable[[int], Cluster]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The fastest plan for a number of ranks and a sequence length; `best` is None if no plan that we tried fits."""

    world_size: int
    sequence: int
    best: Plan | None


def sweep(
    subjects: Iterable[Subject], settings: Settings, cluster_of: ClusterOf, world_sizes: Iterable[int]
) -> Iterator[Row]:
    """Yield a row for each model (one per sequence length) and number of ranks.

    For each row, we double the batch for as long as it fits: with each recomputation setting, with and without loss
    chunks, and with sharding across all ranks or within each node.
    """
    sizes = list(world_sizes)
    for subject in subjects:
        for world_size in sizes:
            yield Row(
                world_size=world_size,
                sequence=subject.sequence,
                best=best_plan(subject, settings, cluster_of(world_size)),
            )


@cache  # `fewest_ranks` asks again for numbers of ranks that are in the table
def best_plan(subject: Subject, settings: Settings, cluster: Cluster) -> Plan | None:
    """Return the fastest plan that fits on `cluster`, or None if none fits. Raises ValueError if no rate is known."""
    chunks = (1, FEWEST_CHUNKS) if subject.chunks_loss else (1,)
    found = []
    for loss_chunks in chunks:
        start = replace(settings, batch=subject.sequence, loss_chunks=loss_chunks)
        plan = make_plan(subject, start, cluster)
        if plan.time is None:
            raise ValueError("--sweep compares speeds; name a --device, or give --tflops")
        if (best := fastest(plan, subject)) is not None:
            found.append(best)
    return max(found, key=lambda plan: plan.items_per_s_estimate, default=None)


def powers_of_two(most: int) -> list[int]:
    """Return the numbers of ranks to try: FEWEST_RANKS, doubled repeatedly while below `most`, and then `most`."""
    sizes = [FEWEST_RANKS]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return [size for size in sizes if size < most] + [most]


def days_of(plan: Plan, total: float, goodput: float = 1.0) -> float:
    """Return the number of days that a run over `total` items takes."""
    return device_hours(plan, total, goodput) / plan.cluster.world_size / DAY_HOURS


def fewest_ranks(
    subject: Subject, settings: Settings, cluster_of: ClusterOf, *, total: float, days: float, most: int, goodput: float
) -> Plan | None:
    """Return the plan with the fewest ranks, in full nodes, that processes `total` items within `days`.

    Returns None if even `most` ranks are too few. This assumes that more ranks are faster, which is true until the
    network becomes the bottleneck.
    """
    node = cluster_of(1).ranks_per_node

    def in_time(nodes: int) -> Plan | None:
        plan = best_plan(subject, settings, cluster_of(nodes * node))
        return plan if plan is not None and days_of(plan, total, goodput) <= days else None

    too_few, enough = 0, max(1, most // node)
    best = in_time(enough)
    while best is not None and enough - too_few > 1:
        middle = (too_few + enough) // 2
        found = in_time(middle)
        too_few, enough, best = (too_few, middle, found) if found is not None else (middle, enough, best)
    return best


def fewest_that_fit(subject: Subject | str, settings: Settings, cluster: Cluster, most: int = 2**14) -> int | None:
    """Return the fewest ranks on which the plan fits, or None if even `most` are too few.

    With more ranks, each needs less memory, until padding outweighs the savings. So we double the number of ranks until
    the plan fits, and then bisect.
    """

    def fits(ranks: int) -> bool:
        return make_plan(subject, settings, replace(cluster, world_size=ranks)).fits

    too_few, enough = 0, 1
    while not fits(enough):
        too_few, enough = enough, 2 * enough
        if enough > most:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough
