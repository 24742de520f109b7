"""Put a GPU's communication and arithmetic on a timeline, as queues that run in parallel. No torch import.

Arithmetic runs in one queue and collectives in another, so both can be busy at the same time if an all-gather starts
early enough. A third queue follows reductions: hybrid sharding's all-reduces across the copies of the state, in their
own ring, and copies of gradients to the host. Other costs (kernel launches, copies within the device) are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

ARITHMETIC, COMMUNICATION, COPIES = "arithmetic", "communication", "between copies"
BACKWARD_FACTOR = 2  # two matrix products for each one in forward
FROM_HOST, TO_HOST = "from host", "to host"  # copies of shards that are offloaded
AT_START, AT_END = "start", "end"  # when a collective is issued: at the start or end of the arithmetic before it


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of a rank's tasks in a step: arithmetic or a collective."""

    queue: str
    op: str  # "forward", "backward", the name of a collective, FROM_HOST or TO_HOST
    unit: str | int
    amount: float = 0.0  # operations, or bytes of the full tensor
    issued: str = AT_START  # for a collective: AT_START or AT_END
    ranks: int = 1  # for a collective: how many ranks take part


@dataclass(frozen=True, kw_only=True)
class Span:
    """A task on the timeline: its queue, unit, start and end."""

    queue: str
    op: str  # "all_gather", "reduce_scatter", "all_reduce", "forward" or "backward"
    unit: str | int
    start_s: float
    end_s: float


def run_tasks(tasks: Iterable[Task], seconds_of: Callable[[Task], float]) -> list[Span]:
    """Return the start and end of each task, in the same order as `tasks`.

    Tasks in the same queue run one after another. A unit computes once it's unsharded, and a gradient is sent once it's
    computed. FSDP2 keeps only one reduce-scatter's input, so after a reduction is issued, arithmetic waits until the
    previous reduction has ended.
    """
    free_s = dict.fromkeys((ARITHMETIC, COMMUNICATION, COPIES), 0.0)
    gathered_s: dict[str | int, float] = {}
    spans: list[Span] = []
    before = Span(queue=ARITHMETIC, op="", unit="", start_s=0.0, end_s=0.0)  # the last arithmetic
    reduced_s = 0.0  # the end of the last reduction
    for task in tasks:
        if task.queue == ARITHMETIC:
            ready_s = gathered_s.get(task.unit, 0.0)
        elif task.queue == COPIES:
            ready_s = max(free_s[COMMUNICATION], before.end_s)  # a shard leaves once it's complete
        else:
            ready_s = before.start_s if task.issued == AT_START else before.end_s
        start_s = max(free_s[task.queue], ready_s)
        span = Span(queue=task.queue, op=task.op, unit=task.unit, start_s=start_s, end_s=start_s + seconds_of(task))
        spans.append(span)
        free_s[task.queue] = span.end_s
        if task.queue == ARITHMETIC:
            before = span
        elif task.op in ("all_gather", FROM_HOST):
            gathered_s[task.unit] = span.end_s
        elif task.op == "reduce_scatter":
            free_s[ARITHMETIC] = max(free_s[ARITHMETIC], reduced_s)
            reduced_s = span.end_s
    return spans


def length_s(spans: Iterable[Span]) -> float:
    """Return the time at which the last of `spans` ends, in seconds."""
    return max((span.end_s for span in spans), default=0.0)


def busy_s(spans: Iterable[Span], *queues: str) -> float:
    """Return the total time that these queues are busy, in seconds."""
    return sum(span.end_s - span.start_s for span in spans if span.queue in queues)


def step_spans(num_units: int, *, forward_s: float, gather_s: float, reduce_s: float, prefetch: bool) -> list[Span]:
    """Return the spans of a step with equal units: forward in order, then backward in reverse, both with all-gathers.

    With `prefetch`, an all-gather is issued when the previous unit starts computing; without it, when that unit is
    done. A unit's all-gather is issued before the previous unit's reduction.
    """
    seconds = {
        "forward": forward_s,
        "backward": BACKWARD_FACTOR * forward_s,
        "all_gather": gather_s,
        "reduce_scatter": reduce_s,
    }
    order = [("forward", unit) for unit in range(num_units)]
    order += [("backward", unit) for unit in reversed(range(num_units))]
    issued = AT_START if prefetch else AT_END
    tasks: list[Task] = []
    waiting: Task | None = None  # the previous unit's reduction
    for phase, unit in order:
        tasks.append(Task(queue=COMMUNICATION, op="all_gather", unit=unit, issued=issued))
        if waiting:
            tasks.append(waiting)
        tasks.append(Task(queue=ARITHMETIC, op=phase, unit=unit))
        if phase == "backward":
            waiting = Task(queue=COMMUNICATION, op="reduce_scatter", unit=unit, issued=AT_END)
    return run_tasks([*tasks, waiting], lambda task: seconds[task.op])
