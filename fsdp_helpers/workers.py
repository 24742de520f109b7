"""The rank functions that notebooks, tests and the command line launch."""

import platform
import time
from itertools import islice

import torch
import torchvision
from torch import Tensor

from fsdp_helpers import progress
from fsdp_helpers.comms import count_collectives, gather_over_ranks, sum_over_ranks
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data import Dataset, DataError, evaluation_batches, load_data, rank_batches
from fsdp_helpers.memory import MemoryTrace, state_bytes
from fsdp_helpers.models import build_model
from fsdp_helpers.ranks import rank_device
from fsdp_helpers.records import EpochRecord, RankRecord, RunRecord, StepTrace
from fsdp_helpers.strategies import STRATEGIES, count_units
from fsdp_helpers.training import evaluate, train_one_epoch

STEADY_STEP = 3  # the first step creates optimiser state, the second may rearrange buckets


def train_worker(rank: int, world_size: int, config: TrainConfig) -> RunRecord:
    """Train and evaluate one model as `config` says; every rank returns the same record of all ranks."""
    config.check_world_size(world_size)
    device = rank_device()
    dataset = load_rank_data(config, device)
    steps_per_epoch = len(dataset.train) // config.global_batch_size
    num_steps = min(config.epochs * steps_per_epoch, config.max_steps or float("inf"))

    watch = StepWatch(rank, world_size, config, num_steps, dataset.train.num_bytes, device)
    torch.manual_seed(config.seed)  # every rank builds the same model
    model = build_model(config.model, dropout=config.dropout)
    model = STRATEGIES[config.strategy](model, device, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks

    epochs, step_losses = [], []
    for epoch in range(config.epochs):
        batches = rank_batches(
            dataset.train,
            rank=rank,
            world_size=world_size,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            epoch=epoch,
        )
        batches = islice(batches, num_steps - len(step_losses))
        watch.begin_epoch(epoch)
        losses = train_one_epoch(model, batches, optimizer, after_step=watch.after_step)
        losses = (sum_over_ranks(losses.double()) / world_size).tolist()
        step_losses += losses
        test_batches = evaluation_batches(dataset.test, rank=rank, world_size=world_size)
        test_sums = sum_over_ranks(evaluate(model, test_batches))
        epochs.append(epoch_record(config, losses, watch.epoch_seconds, test_sums))
        if len(step_losses) == num_steps:
            break

    ranks, traces = zip(*gather_over_ranks(rank_record(rank, model, optimizer, watch.trace)), strict=True)
    return RunRecord(
        config=config,
        data_source=dataset.source,
        versions=versions(),
        device=device.type,
        world_size=world_size,
        epochs=tuple(epochs),
        step_losses=tuple(step_losses),
        step_seconds=tuple(gather_over_ranks(watch.step_seconds)[0]),
        ranks=ranks,
        traces=tuple(trace for trace in traces if trace is not None),
    )


def load_rank_data(config: TrainConfig, device: torch.device) -> Dataset:
    """The images that `config` asks for, whole on every rank, on its device."""
    dataset = load_data(config.data_dir)
    if len(set(gather_over_ranks(dataset.source))) > 1:
        raise DataError("some ranks find MNIST and others do not; give every machine the same data folder")
    train = dataset.train.first(config.train_images)
    config.check_data_size(len(train))
    test = dataset.test.first(config.test_images)
    return Dataset(source=dataset.source, train=train.to(device), test=test.to(device))


class StepWatch:
    """Looks on while a rank trains: times every step, traces up to a steady one, reports progress."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: TrainConfig,
        num_steps: int,
        dataset_bytes: int,
        device: torch.device,
    ) -> None:
        self._config, self._num_steps, self._device = config, num_steps, device
        self._dataset_bytes = dataset_bytes if device.type == "cuda" else 0  # on the CPU they precede the trace
        self._trace = MemoryTrace(device)
        self._trace.start()
        self.trace: StepTrace | None = None  # of a steady step, once there was one
        self.step_seconds: list[float] = []

    def begin_epoch(self, epoch: int) -> None:
        self._title = f"{self._config.strategy}, epoch {epoch + 1}/{self._config.epochs}"
        self._first_step = len(self.step_seconds)
        self._clock_s = time.perf_counter()

    @property
    def epoch_seconds(self) -> float:
        return sum(self.step_seconds[self._first_step :])

    def after_step(self, loss: Tensor, batch_bytes: int) -> None:
        """Called after each step; what happens in here is on nobody's clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.step_seconds.append(time.perf_counter() - self._clock_s)
        if self._trace.is_running and len(self.step_seconds) == min(STEADY_STEP, self._num_steps):
            self._trace.stop()
            if self._num_steps > 1:
                self.trace = self._trace.last("train step", uncounted_bytes=self._dataset_bytes + batch_bytes)
        self._report(loss)
        self._clock_s = time.perf_counter()

    def _report(self, loss: Tensor) -> None:
        done, total = len(self.step_seconds), self._num_steps
        if progress.wants_report(done, total):
            images_per_s = (done - self._first_step) * self._config.global_batch_size / self.epoch_seconds
            progress.report(done, total, self._title, f"{images_per_s:,.0f} images/s, loss {loss.item():.4f}")


def epoch_record(config: TrainConfig, losses: list[float], seconds: float, test_sums: Tensor) -> EpochRecord:
    """Means from sums: every image once, whatever the number of ranks."""
    test_loss, test_correct, test_images = test_sums.tolist()
    train_images = len(losses) * config.global_batch_size
    return EpochRecord(
        train_loss=sum(losses) / len(losses),
        test_loss=test_loss / test_images,
        test_accuracy=test_correct / test_images,
        test_correct=int(test_correct),
        test_images=int(test_images),
        train_images=train_images,
        seconds=seconds,
        images_per_s=train_images / seconds,
    )


def rank_record(
    rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, trace: StepTrace | None
) -> tuple[RankRecord, StepTrace | None]:
    """What this rank kept, held and sent."""
    state = state_bytes(model, optimizer)
    record = RankRecord(
        rank=rank,
        parameter_bytes=state.parameter_bytes,
        gradient_bytes=state.gradient_bytes,
        optimizer_bytes=state.optimizer_bytes,
        held_bytes=trace.curve.held_bytes if trace else None,
        peak_bytes=trace.curve.peak_bytes if trace else None,
        num_units=count_units(model),
        collectives=count_collectives(trace.collectives) if trace else (),
    )
    return record, trace


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__}
