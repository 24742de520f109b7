"""When a GPU gathers and when it computes, for given seconds: two queues side by side. No torch import.

All units are alike. Arithmetic runs in one queue, communication in the other, and both can be busy at once, if a gather
was asked for in time. What else costs time on a real GPU (launching, copies, links that are shared) is left out.
"""

from dataclasses import dataclass

ARITHMETIC, COMMUNICATION = "arithmetic", "communication"
BACKWARD_FACTOR = 2  # two products for each one of forward


@dataclass(frozen=True, kw_only=True)
class Span:
    """What one queue does with one unit, from when to when."""

    queue: str
    what: str  # "all_gather", "reduce_scatter", "forward" or "backward"
    unit: int
    start_s: float
    end_s: float


def step_spans(num_units: int, *, forward_s: float, gather_s: float, reduce_s: float, prefetch: bool) -> list[Span]:
    """Return every stretch of a step: forward unit by unit, backward in reverse, each unit gathered for both.

    With `prefetch` a gather is asked for when the unit before begins to compute, without it when that unit is done. A
    unit's gather goes before the reduction of the unit that was computed just before it.
    """
    order = [("forward", unit) for unit in range(num_units)]
    order += [("backward", unit) for unit in reversed(range(num_units))]
    spans: list[Span] = []
    link_free_s, before = 0.0, None  # when communication is done; the unit that was computed last

    def use_link(what: str, unit: int, asked_s: float, seconds: float) -> float:
        nonlocal link_free_s
        start_s = max(link_free_s, asked_s)
        link_free_s = start_s + seconds
        spans.append(Span(queue=COMMUNICATION, what=what, unit=unit, start_s=start_s, end_s=link_free_s))
        return link_free_s

    for phase, unit in order:
        done_s = before.end_s if before else 0.0
        asked_s = before.start_s if before and prefetch else done_s
        whole_s = use_link("all_gather", unit, asked_s, gather_s)
        if before and before.what == "backward":
            use_link("reduce_scatter", before.unit, done_s, reduce_s)
        start_s = max(whole_s, done_s)
        end_s = start_s + forward_s * (BACKWARD_FACTOR if phase == "backward" else 1)
        before = Span(queue=ARITHMETIC, what=phase, unit=unit, start_s=start_s, end_s=end_s)
        spans.append(before)
    use_link("reduce_scatter", before.unit, before.end_s, reduce_s)
    return spans
