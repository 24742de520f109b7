"""The rank functions that notebooks, tests and the command line launch."""

import math
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_helpers.checkpointing.resume import RunCheckpoints, run_checkpoints
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data.images import Dataset, evaluation_batches, load_data, rank_batches
from fsdp_helpers.data.source import DataError
from fsdp_helpers.gpus import device_name
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import gather_over_ranks, rank_device, sum_over_ranks
from fsdp_helpers.records import EpochRecord, RunRecord
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY, rebuild_ddp_buckets, wait_for_buckets
from fsdp_helpers.training.loop import Batches, evaluate, train_one_epoch
from fsdp_helpers.training.watch import StepWatch


def train_worker(rank: int, world_size: int, config: TrainConfig) -> RunRecord:
    """Train and evaluate a model according to `config`; every rank returns the same record, which covers all ranks."""
    config.check_world_size(world_size)
    device = rank_device()
    config.check_device(device.type)
    dataset = load_rank_data(config, device)
    with run_checkpoints(config, rank, dataset.source) as checkpoints:
        return run_training(rank, world_size, config, dataset, checkpoints)


def run_training(
    rank: int, world_size: int, config: TrainConfig, dataset: Dataset, checkpoints: RunCheckpoints
) -> RunRecord:
    """Set up and train, from the beginning or from where `checkpoints` left off; return the record."""
    first_step = checkpoints.step  # 0, unless the run is resumed
    parts = epochs_to_train(config, len(dataset.train) // config.global_batch_size, first_step)
    num_steps = sum(part.num_steps for part in parts)

    watch = StepWatch(config, num_steps, rank_device(), world_size, rank=rank, steps_before=first_step)
    model, optimizer = set_up(rank, config)
    if first_step:
        rebuild_ddp_buckets(model, dataset.train.images[: config.global_batch_size // world_size])
        checkpoints.load(model, optimizer)
    watch.watch(
        model, optimizer, between_steps=lambda: checkpoints.after_step(model, optimizer, first_step + num_steps)
    )
    epochs, step_losses = train_epochs(rank, world_size, config, dataset, parts, model, optimizer, watch)
    return run_record(rank, world_size, config, dataset.source, first_step, epochs, step_losses, watch)


def set_up(rank: int, config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model with its strategy applied, and an optimizer built afterward for the resulting parameters."""
    torch.manual_seed(config.seed)  # every rank builds the same model
    model = build_model(config.model, dropout=config.dropout)
    model = APPLY_STRATEGY[config.strategy](model, rank_device(), config)
    wait_for_buckets(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks
    return model, optimizer


class EpochPart(NamedTuple):
    """The steps that a run takes in one epoch: all of them, unless it's resumed or ends early."""

    epoch: int  # counted from 0
    first_step: int  # within the epoch
    num_steps: int


def epochs_to_train(config: TrainConfig, steps_per_epoch: int, steps_done: int) -> list[EpochPart]:
    """Return what's left of each epoch after `steps_done` steps.

    If nothing is left, return an empty part of the last epoch, so that the model is still evaluated.
    """
    last_step = max(steps_done, min(config.epochs * steps_per_epoch, config.max_steps or math.inf))
    first_epoch = min(steps_done, last_step - 1) // steps_per_epoch
    last_epoch = (last_step - 1) // steps_per_epoch
    parts = []
    for epoch in range(min(first_epoch, config.epochs - 1), min(last_epoch, config.epochs - 1) + 1):
        first_step = max(0, steps_done - epoch * steps_per_epoch)
        end_step = min(steps_per_epoch, last_step - epoch * steps_per_epoch)
        parts.append(EpochPart(epoch, first_step, max(0, end_step - first_step)))
    return parts


def train_epochs(
    rank: int,
    world_size: int,
    config: TrainConfig,
    dataset: Dataset,
    parts: list[EpochPart],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: StepWatch,
) -> tuple[list[EpochRecord], list[float]]:
    """Train and then evaluate, epoch by epoch; return the epoch records and the loss of every step.

    A rank sees only its own images, so it has only part of each sum. The parts are summed across ranks and then
    divided, so every rank returns the same values.
    """
    epochs, step_losses = [], []
    settings = {"micro_batches": config.micro_batches, "sync_micro_batches": config.reduces_every_part}
    for epoch, first_step, num_steps in parts:
        batches = islice(config_batches(dataset, config, rank, world_size, epoch, first_step), num_steps)
        watch.begin_epoch(epoch)
        losses = train_one_epoch(model, batches, optimizer, watch.after_step, **settings)
        losses = (sum_over_ranks(losses.double()) / world_size).tolist()
        test_batches = evaluation_batches(dataset.test, rank=rank, world_size=world_size)
        test_sums = sum_over_ranks(evaluate(model, watch.evaluation(test_batches)))
        seconds = max(gather_over_ranks(watch.epoch_seconds))
        epochs.append(epoch_record(config, epoch + 1, losses, seconds, test_sums))
        step_losses += losses
    return epochs, step_losses


def load_rank_data(config: TrainConfig, device: torch.device) -> Dataset:
    """Load the images that `config` names, all of them on every rank's device.

    Raises DataError if ranks find different data, and ValueError as `check_data_size` does.
    """
    dataset = load_data(config.data_dir, train_images=config.train_images, test_images=config.test_images)
    if len(set(gather_over_ranks(dataset.source))) > 1:
        raise DataError("some ranks find MNIST and others don't; give every machine the same data folder")
    config.check_data_size(dataset.source, len(dataset.train), len(dataset.test))
    return Dataset(source=dataset.source, train=dataset.train.to(device), test=dataset.test.to(device))


def config_batches(
    dataset: Dataset, config: TrainConfig, rank: int, world_size: int, epoch: int, first_step: int = 0
) -> Batches:
    """Yield this rank's batches for one epoch: images (B / world_size, 1, 28, 28) and labels (B / world_size,)."""
    return rank_batches(
        dataset.train,
        rank=rank,
        world_size=world_size,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        epoch=epoch,
        first_step=first_step,
    )


@record_function("data")  # traces leave out images that are loaded under this name
def first_batches(rank: int, world_size: int, config: TrainConfig) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's first `config.max_steps` batches (`config_batches` has their shapes), on its device."""
    dataset = load_rank_data(config, rank_device())
    return list(islice(config_batches(dataset, config, rank, world_size, epoch=0), config.max_steps))


def epoch_record(
    config: TrainConfig, epoch: int, losses: list[float], seconds: float, test_sums: Tensor
) -> EpochRecord:
    """Return an epoch's record. Means come from the sums (3,) of `evaluate`, so that each image counts once."""
    test_loss, test_correct, test_images = test_sums.tolist()
    train_images = len(losses) * config.global_batch_size
    return EpochRecord(
        epoch=epoch,
        train_loss=sum(losses) / len(losses) if losses else None,
        test_loss=test_loss / test_images,
        test_accuracy=test_correct / test_images,
        test_correct=int(test_correct),
        test_images=int(test_images),
        train_images=train_images,
        seconds=seconds,
        images_per_s=train_images / seconds if losses else None,
    )


def run_record(
    rank: int,
    world_size: int,
    config: TrainConfig,
    data_source: str,
    first_step: int,
    epochs: list[EpochRecord],
    step_losses: list[float],
    watch: StepWatch,
) -> RunRecord:
    """Collect every rank's measurements; return the same record on every rank."""
    ranks = gather_over_ranks(watch.rank_record(rank))
    traces = gather_over_ranks(watch.trace)
    return RunRecord(
        config=config,
        data_source=data_source,
        versions=versions(),
        device=rank_device().type,
        device_name=device_name(rank_device()),
        finished=gather_over_ranks(time_stamp())[0],
        world_size=world_size,
        epochs=tuple(epochs),
        first_step=first_step,
        step_losses=tuple(step_losses),
        step_seconds=tuple(gather_over_ranks(watch.step_seconds)[0]),
        ranks=tuple(ranks),
        traces=tuple(trace for trace in traces if trace is not None),
    )


def time_stamp() -> str:
    """Return the current date and time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    others = {"torchvision": version("torchvision")} if find_spec("torchvision") else {}  # only MNIST needs it
    return {"python": platform.python_version(), "torch": torch.__version__, **others}
