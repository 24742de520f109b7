"""Estimate how long a step takes: arithmetic and collectives in queues, then the optimizer. No torch import.

The walk (`planning.peak`) lists a rank's tasks in order. Here, we calculate how long each task takes, and the queues in
`planning.streams` show which tasks overlap. The result is an estimate with a range. If you name a device, the range is
the spread of published runs on such devices. Otherwise, the shortest step has full overlap; the longest has none, and
its rates are lower than yours by the same spread.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_helpers.planning.network import Network
from fsdp_helpers.planning.peak import Step
from fsdp_helpers.planning.profile import ROOT
from fsdp_helpers.planning.streams import ARITHMETIC, COMMUNICATION, COPIES, Span, Task, busy_s, length_s, run_tasks
from fsdp_helpers.planning.traffic import step_range_s

# A block's forward has about fifty kernels, and the host takes 5 to 20 µs to launch each: up to a millisecond in all.
LAUNCH_BOUND_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long a step takes, and why: the seconds for arithmetic, for communication and for the optimizer."""

    arithmetic_s: float
    communication_s: float  # how long the links are busy
    optimizer_s: float
    estimate_s: float
    shortest_s: float
    longest_s: float
    spans: tuple[Span, ...]
    launches_decide: bool = False  # units compute so briefly that the GPU waits for kernel launches

    @property
    def exposed_s(self) -> float:
        """Return the number of seconds that arithmetic waits for collectives or for the host."""
        return self.estimate_s - self.arithmetic_s - self.optimizer_s


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The rates and the sharding that determine how long one rank's tasks take."""

    flops_per_s: float
    network: Network
    shards: int  # ranks that share one copy of the state
    replicas: int  # number of copies; with DDP, each rank has one
    host_bytes_per_s: float = float("inf")  # to and from the host, if it keeps the shards
    optimizer_s: float = 0.0
    spread: float | None = None  # how far published runs on a named device are above or below the estimate


def time_step(
    step: Step, unit_flops: Mapping[str, float], speed: Speed, *, backward_factor: float, parts: int = 1
) -> StepTime:
    """Return the times of a step of `parts` micro-batches, each with `unit_flops` operations per module in forward.

    Backward takes `backward_factor` times as many operations, recomputation included.
    """
    seconds = _Seconds(step.tasks, unit_flops, speed, backward_factor, parts)
    spans = run_tasks(step.tasks, seconds)
    arithmetic_s, communication_s = busy_s(spans, ARITHMETIC), busy_s(spans, COMMUNICATION, COPIES)
    estimate_s = length_s(spans) + speed.optimizer_s
    if speed.spread is None:
        shortest_s, longest_s = (bound + speed.optimizer_s for bound in step_range_s(arithmetic_s, communication_s))
    else:
        shortest_s, longest_s = estimate_s / (1 + speed.spread), estimate_s / (1 - speed.spread)
    return StepTime(
        arithmetic_s=arithmetic_s,
        communication_s=communication_s,
        optimizer_s=speed.optimizer_s,
        estimate_s=estimate_s,
        shortest_s=shortest_s,
        longest_s=longest_s,
        spans=tuple(spans),
        launches_decide=_longest_forward_s(spans) < LAUNCH_BOUND_S,
    )


def _longest_forward_s(spans: Sequence[Span]) -> float:
    return max((span.end_s - span.start_s for span in spans if span.op == "forward"), default=float("inf"))


class _Seconds:
    """A callable that returns a task's time in seconds. A unit's operations are split among its arithmetic tasks."""

    def __init__(
        self, tasks: Sequence[Task], unit_flops: Mapping[str, float], speed: Speed, backward_factor: float, parts: int
    ) -> None:
        self._speed = speed
        self._factor: dict[str, float] = {"forward": parts, "backward": parts * backward_factor}
        arithmetic = [task for task in tasks if task.queue == ARITHMETIC]
        self._flops: Counter[Any] = flops_by_unit(unit_flops, {str(task.unit) for task in arithmetic})
        self._shares: dict[tuple[str, str | int], float] = defaultdict(float)
        for task in arithmetic:
            self._shares[task.op, task.unit] += task.amount

    def __call__(self, task: Task) -> float:
        speed = self._speed
        if task.queue == ARITHMETIC:
            share = task.amount / self._shares[task.op, task.unit]
            return share * self._factor[task.op] * self._flops[task.unit] / speed.flops_per_s
        if task.ranks == 1:  # a copy of its own shard, from or to the host
            return task.amount / speed.host_bytes_per_s
        if task.op == "all_reduce":
            return speed.network.seconds(task.op, task.amount, speed.replicas, stride=speed.shards)
        return speed.network.seconds(task.op, task.amount, speed.shards)


def flops_by_unit(unit_flops: Mapping[str, float], units: set[str]) -> Counter[str]:
    """Return the operation count per unit; a module counts toward the innermost unit that contains it, or the root."""
    found = Counter(dict.fromkeys(units, 0))
    for module, flops in unit_flops.items():
        around = [unit for unit in units if unit != ROOT and f"{module}.".startswith(f"{unit}.")]
        found[max(around, key=len, default=ROOT)] += flops
    return found
