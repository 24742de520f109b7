"""The results of a run: frozen records, simple enough to send between processes or to save as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from fsdp_helpers.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The size in bytes of the state that a rank holds between two training steps."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # Adam's two moments per parameter; its step counters (4 bytes per tensor) aren't counted

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A named interval of a step: forward, backward, step."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Bytes allocated on the training device over time, as a step function.

    `allocated_bytes[i]` is valid from `times_s[i]` until `times_s[i + 1]`; times start at the first point.
    """

    times_s: tuple[float, ...]
    allocated_bytes: tuple[int, ...]
    phases: tuple[Phase, ...] = ()

    @property
    def end_s(self) -> float:
        """Return the time at which the last phase ends; memory may have stopped changing earlier."""
        return max([self.times_s[-1], *(phase.end_s for phase in self.phases)])

    @property
    def held_bytes(self) -> int:
        """Return the number of bytes still allocated at the end, which are held between two steps."""
        return self.allocated_bytes[-1]

    @property
    def peak_bytes(self) -> int:
        return max(self.allocated_bytes)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation as one rank saw it.

    `bytes` is the size of the full tensor, including padding; `sent_bytes` is how much this rank sends for it in a
    ring, by the formula in `planning/traffic.py`. `end_s` is infinite for one that never ended.
    """

    op: str
    bytes: int
    sent_bytes: int
    start_s: float
    end_s: float
    unit: str = ""  # the FSDP2 unit whose tensors it moves
    shapes: str = ""  # of tensors that must be alike on all ranks
    group: tuple = ()  # its process group's name and ranks
    waited_s: float = 0.0  # for the last rank to come; known once all ranks' traces have been compared
    unequal: str = ""  # if the ranks' calls weren't alike, what each of them called


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """All collectives of one kind in a step: their count, their full tensors' bytes, and the bytes this rank sends."""

    op: str
    count: int
    bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The size of one rank's state, and its memory use and collectives during a steady step.

    If the run has only one step, which isn't steady, then `held_bytes` and `peak_bytes` are None, and `collectives` is
    empty.
    """

    rank: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    held_bytes: int | None
    peak_bytes: int | None
    num_units: int
    collectives: tuple[CollectiveCount, ...]

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank sends in a step, over all collectives."""
        return sum(seen.sent_bytes for seen in self.collectives)

    def count(self, op: str | None = None) -> int:
        """Return the number of collectives in a step; if `op` is given, count only that kind."""
        return sum(seen.count for seen in self.collectives if op in (None, seen.op))


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Everything observed on one rank during one steady step; used for plots, not for JSON."""

    curve: MemoryCurve
    collectives: tuple[Collective, ...]
    began_s: float = 0.0  # on the clock of `time.perf_counter()`; all other times are relative to this one
    steps_s: tuple[float, ...] = ()  # when each optimizer step ended
    reserved_bytes: int | None = None  # the most that CUDA's allocator had reserved by then; None on the CPU


def later(record: Any, delay_s: float) -> Any:
    """Return a record, or a tuple or dict of records, with times that count from a moment `delay_s` seconds earlier.

    A record's times are its only floats, apart from how long it waited.
    """
    if isinstance(record, float):
        return record + delay_s
    if isinstance(record, tuple):
        return tuple(later(one, delay_s) for one in record)
    if isinstance(record, dict):
        return {name: later(one, delay_s) for name, one in record.items()}
    if not is_dataclass(record):
        return record
    others_s = {"began_s": -delay_s, "waited_s": 0.0}
    moved = {
        field.name: later(getattr(record, field.name), others_s.get(field.name, delay_s)) for field in fields(record)
    }
    return replace(record, **moved)


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One pass over the training images, and the evaluation after it."""

    epoch: int  # counted from 1
    train_loss: float | None  # mean over the training images; None if a resumed run had nothing left to train
    test_loss: float  # mean over all test images
    test_accuracy: float  # fraction, 0 to 1
    test_correct: int
    test_images: int  # for a text, the number of bytes that were predicted
    train_images: int
    seconds: float  # training only
    images_per_s: float | None


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest per-step difference between two lists of losses; NaN if any loss is NaN.

    Raises ValueError if they have different numbers of steps, or no steps at all.
    """
    if len(losses) != len(others) or not losses:
        raise ValueError(f"{len(losses)} steps can't be compared with {len(others)}")
    differences = [abs(one - other) for one, other in zip(losses, others, strict=True)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one training run, the same on every rank."""

    config: TrainConfig
    data_source: str
    versions: dict[str, str]
    device: str
    device_name: str
    finished: str  # date and time, UTC
    world_size: int
    epochs: tuple[EpochRecord, ...]
    first_step: int  # steps already taken when a resumed run began; 0 for a run from the start
    step_losses: tuple[float, ...]  # mean over the global batch, one per step of this process
    step_seconds: tuple[float, ...]  # rank 0's, one per step
    ranks: tuple[RankRecord, ...]
    traces: tuple[StepTrace, ...] = ()  # one per rank; empty for a run of a single step

    def largest_difference(self, other: "RunRecord | Sequence[float]") -> float:
        """Return the largest per-step difference between this run's losses and `other`, a run or a list of losses.

        Raises ValueError if they have different numbers of steps, or no steps at all.
        """
        return largest_difference(self.step_losses, other.step_losses if isinstance(other, RunRecord) else other)

    @property
    def why_no_more_steps(self) -> str | None:
        """Return why the run took fewer than `max_steps` steps, or none at all, and what to do; None if it took all."""
        done, config = self.first_step + len(self.step_losses), self.config
        if config.max_steps is not None and done < config.max_steps:
            return (
                f"ended after {done} of {config.max_steps} steps: the images of {config.epochs} "
                f"epoch{'s' * (config.epochs != 1)} are used up; raise --epochs"
            )
        if not self.step_losses:
            return f"nothing left to train: step {done} was the last one; raise --max-steps or --epochs"
        return None

    def to_json(self) -> dict:
        """Return the record without traces, in the form that the command line writes."""
        fields = asdict(self)
        del fields["traces"]
        return fields


@dataclass(frozen=True, kw_only=True)
class SavingRecord:
    """The time, memory and disk space that one saving method takes, each from the rank where it's highest."""

    method: str
    waiting_s: float  # how long training is blocked
    total_s: float  # until the checkpoint is complete
    disk_bytes: int  # of all files together
    extra_bytes: int  # the most that saving allocates on the training device, in addition to the state


@dataclass(frozen=True, kw_only=True)
class LeverResult:
    """The result of adding one memory lever to the previous levers, measured on rank 0 (notebook 07)."""

    name: str
    strategy: str
    predicted_bytes: int  # the calculated peak
    peak_bytes: int
    held_bytes: int
    step_s: float  # median of the steady steps


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One strategy in the closing comparison, measured on rank 0."""

    model: str
    strategy: str
    api: str | None  # None for a strategy other than FSDP
    world_size: int
    step_s: float  # median of the steady steps
    held_bytes: int
    peak_bytes: int
    moved_bytes: int  # full-tensor bytes of all collectives in a step; an all-gather counts as much as an all-reduce
    sent_bytes: int | None = None  # bytes that the rank sends in a step; None in records older than this field
    final_loss: float
    bucket_view: bool = False

    @property
    def label(self) -> str:
        if self.bucket_view:
            return f"{self.strategy}, lean"
        return self.strategy if self.api is None else f"{self.strategy} ({self.api})"
