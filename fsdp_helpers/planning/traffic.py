"""Calculate the bytes that a rank sends for one collective, and the size of a padded unit. No torch import.

N ranks in a ring split a tensor into N parts, and each rank passes on one part at a time: N - 1 times until the sums
are complete (a reduce-scatter), and N - 1 times until every rank has all parts (an all-gather). An all-reduce does
both. No algorithm lets every rank send less: P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce
algorithms for clusters of workstations*, 2009. A library may send more: gloo's reduce-scatter is an all-reduce, after
which each rank keeps only its part.
"""

from collections.abc import Sequence
from math import prod

from fsdp_helpers.planning.devices import TYPICAL_RANGE


def ring_sent_bytes(op: str, full_bytes: int, num_ranks: int, *, is_root: bool = False) -> int:
    """Return the bytes that a rank sends for a collective in a ring of `num_ranks` ranks, rounded to whole bytes.

    `full_bytes` is the size of the full tensor, padding included: an all-gather's output, or a reduce-scatter's input.
    `is_root` is true on the source of a broadcast or scatter, and on the destination of a gather or reduce. Raises
    ValueError for an unknown operation.
    """
    parts_sent = {  # a part is full_bytes / num_ranks
        "all_reduce": 2 * (num_ranks - 1),
        "reduce_scatter": num_ranks - 1,
        "all_gather": num_ranks - 1,
        "all_to_all": num_ranks - 1,
        "broadcast": num_ranks if is_root else 0,
        "reduce": 0 if is_root else num_ranks,
        "scatter": num_ranks - 1 if is_root else 0,
        "gather": 0 if is_root else 1,
        "send": num_ranks,
        "recv": 0,
        "barrier": 0,
    }
    if op not in parts_sent:
        raise ValueError(f"there's no formula for the bytes that {op!r} sends; choose one of {', '.join(parts_sent)}")
    return round(parts_sent[op] * full_bytes / num_ranks) if num_ranks > 1 else 0


def step_range_s(arithmetic_s: float, communication_s: float) -> tuple[float, float]:
    """Return, in seconds, the shortest step time (arithmetic hides all communication) and the longest (it hides none).

    The longest also assumes rates lower than yours by TYPICAL_RANGE, the spread of published runs.

    `communication_s` is the time the link needs for a rank's bytes: sent bytes divided by bytes per second. If it's
    more than four times `arithmetic_s`, the network dominates: even a step that hides nothing takes less than 25%
    longer than the communication alone. How much is hidden depends on when the bytes are ready. DDP sends a bucket once
    backward has computed the last of its gradients, and forward and the optimizer never overlap with communication.
    Headers add to the bytes: with TCP over Ethernet, they're 66 of the 1,514 bytes in a packet, not counting
    acknowledgments and retransmissions. ShallowNet under DDP hides nothing, since most of its bytes belong to one
    layer: its steps took 1.00 to 1.25 times the sum of both times (`notebooks/reference/bandwidth.json`). Source:
    S. Li et al. 2020, arXiv:2006.15704, section 3.2.3, on what overlaps with backward.
    """
    return max(arithmetic_s, communication_s), (arithmetic_s + communication_s) / (1 - TYPICAL_RANGE)


def padded_params(shapes: Sequence[Sequence[int]], num_ranks: int) -> int:
    """Return the number of values in parameters of these shapes, with the rows that FSDP2 adds for equal shards."""
    return sum(_round_up(shape[0], num_ranks) * prod(shape[1:]) for shape in shapes)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
