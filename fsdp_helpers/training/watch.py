"""Observe a rank while it trains: time, memory and progress, without slowing it down."""

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from fsdp_helpers import progress
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.collectives import count_collectives
from fsdp_helpers.measuring.memory import MemoryTrace, state_bytes
from fsdp_helpers.quantities import format_count
from fsdp_helpers.records import RankRecord, StateBytes, StepTrace
from fsdp_helpers.sharding.strategies import count_units

STEADY_STEP = 3  # the first step creates optimizer state, and the second may rearrange buckets


class StepWatch:
    """An observer of a rank's training: it times every step, measures a steady one, and reports progress.

    Create it after the images are loaded and before the model is built, because the memory trace counts everything from
    then on. A resumed run has already taken `steps_before` steps, and its reports continue from there.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_steps: int,
        device: torch.device,
        world_size: int = 1,
        *,
        rank: int = 0,
        steps_before: int = 0,
    ) -> None:
        self._config, self._num_steps, self._device = config, num_steps, device
        self._steps_before = steps_before
        self._title, self._last_loss = run_title(config, world_size, device.type), None
        # The mean over ranks would take a collective per step.
        self._whose_loss = "loss" if world_size == 1 else f"rank {rank}'s loss"
        self._memory = MemoryTrace(device)
        self._memory.start()
        self.state: StateBytes | None = None
        self.trace: StepTrace | None = None  # of a steady step; None in a run of a single step
        self.step_seconds: list[float] = []

    def watch(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, between_steps: Callable[[], None] = lambda: None
    ) -> None:
        """Observe this model and optimizer; `between_steps` is called after every step, and its time isn't counted."""
        self._model, self._optimizer, self._between_steps = model, optimizer, between_steps
        if self._num_steps == 0:  # a resumed run with nothing left to train
            self._memory.stop()
            self.state = state_bytes(model, optimizer)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._first_step = len(self.step_seconds)
        if self._first_step == 0:
            progress.report(self._done, self._last_step, self._title)
        self._clock_s = time.perf_counter()

    @property
    def epoch_seconds(self) -> float:
        return sum(self.step_seconds[self._first_step :])

    def after_step(self, loss: Tensor, batch_bytes: int) -> None:
        """Record the end of a step, with its `loss`, a scalar. The time spent in this method isn't counted."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.step_seconds.append(time.perf_counter() - self._clock_s)
        if len(self.step_seconds) == min(STEADY_STEP, self._num_steps):
            self._measure(batch_bytes)
        self._report(loss)
        self._between_steps()
        self._clock_s = time.perf_counter()

    def _measure(self, batch_bytes: int) -> None:
        self._memory.stop()
        self.state = state_bytes(self._model, self._optimizer)
        if self._num_steps > 1:
            self.trace = self._memory.last("train step", uncounted_bytes=batch_bytes)

    def rank_record(self, rank: int) -> RankRecord:
        """Return this rank's record: the bytes it holds, its peak, and the bytes it sent."""
        return RankRecord(
            rank=rank,
            parameter_bytes=self.state.parameter_bytes,
            gradient_bytes=self.state.gradient_bytes,
            optimizer_bytes=self.state.optimizer_bytes,
            held_bytes=self.trace.curve.held_bytes if self.trace else None,
            peak_bytes=self.trace.curve.peak_bytes if self.trace else None,
            num_units=count_units(self._model),
            collectives=count_collectives(self.trace.collectives) if self.trace else (),
        )

    def evaluation(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `batches` of (images, labels), and report the number of images evaluated so far."""
        num_images, done, last = 0, self._done, self._last_step
        for images, labels in batches:
            if progress.wants_report(done, last):
                details = f"{self._epoch_text}evaluating, {num_images:,} images so far"
                progress.report(done, last, self._title, details)
            num_images += len(labels)
            yield images, labels
        if self._last_loss is not None:
            progress.report(done, last, self._title, self._details(self._last_loss.item()))

    def _report(self, loss: Tensor) -> None:
        self._last_loss = loss
        if progress.wants_report(self._done, self._last_step):
            details = self._details(loss.item())
            progress.report(self._done, self._last_step, self._title, details, loss.item(), self._held_and_peak)

    @property
    def _held_and_peak(self) -> tuple[int, int] | None:
        return (self.trace.curve.held_bytes, self.trace.curve.peak_bytes) if self.trace else None

    @property
    def _done(self) -> int:
        return self._steps_before + len(self.step_seconds)

    @property
    def _last_step(self) -> int:
        return self._steps_before + self._num_steps

    def _details(self, loss: float) -> str:
        num_images = (len(self.step_seconds) - self._first_step) * self._config.global_batch_size
        return f"{self._epoch_text}{num_images / self.epoch_seconds:,.0f} images/s, {self._whose_loss} {loss:.4f}"

    @property
    def _epoch_text(self) -> str:
        return f"epoch {self._epoch + 1}/{self._config.epochs}, " if self._config.epochs > 1 else ""


def run_title(config: TrainConfig, world_size: int, device: str) -> str:
    """Return a title that identifies a run: "shallow, fsdp (fsdp2), 2 ranks on cpu"."""
    way = f" ({config.api})" if config.is_sharded else ", lean" if config.bucket_view else ""
    return f"{config.model}, {config.strategy}{way}, {format_count(world_size, 'rank')} on {device}"
