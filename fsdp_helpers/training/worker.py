"""The rank functions that notebooks, tests and the command line launch."""

import platform
from datetime import UTC, datetime
from itertools import islice

import torch
import torchvision
from torch import Tensor

from fsdp_helpers.checkpointing.resume import RunCheckpoints, run_checkpoints
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data import DataError, Dataset, evaluation_batches, load_data, rank_batches
from fsdp_helpers.models import build_model
from fsdp_helpers.ranks.exchange import gather_over_ranks, sum_over_ranks
from fsdp_helpers.ranks.group import device_name, rank_device
from fsdp_helpers.records import EpochRecord, RunRecord
from fsdp_helpers.sharding.strategies import STRATEGIES, settle_buckets
from fsdp_helpers.training.loop import Batches, evaluate, train_one_epoch
from fsdp_helpers.training.watch import StepWatch


def train_worker(rank: int, world_size: int, config: TrainConfig) -> RunRecord:
    """Train and evaluate one model as `config` says; every rank returns the same record of all ranks."""
    config.check_world_size(world_size)
    device = rank_device()
    config.check_device(device.type)
    dataset = load_rank_data(config, device)
    with run_checkpoints(config, rank, world_size, dataset.source) as checkpoints:
        return run_training(rank, world_size, config, device, dataset, checkpoints)


def run_training(
    rank: int,
    world_size: int,
    config: TrainConfig,
    device: torch.device,
    dataset: Dataset,
    checkpoints: RunCheckpoints,
) -> RunRecord:
    """Model, strategy, optimiser, loop; from the beginning, or from where `checkpoints` stand."""
    steps_per_epoch = len(dataset.train) // config.global_batch_size
    first_step = checkpoints.step  # 0, unless the run is resumed
    last_step = max(first_step, min(config.epochs * steps_per_epoch, config.max_steps or float("inf")))
    # A finished run is still in the epoch of its last step.
    first_epoch = min(min(first_step, last_step - 1) // steps_per_epoch, config.epochs - 1)

    watch = StepWatch(config, last_step - first_step, dataset, device)
    torch.manual_seed(config.seed)  # every rank builds the same model
    model = build_model(config.model, dropout=config.dropout)
    model = STRATEGIES[config.strategy](model, device, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks
    if first_step:
        settle_buckets(model, dataset.train.images[: config.global_batch_size // world_size])
        checkpoints.load(model, optimizer)
    watch.watch(model, optimizer)

    def after_step(loss: Tensor, batch_bytes: int) -> None:
        watch.after_step(loss, batch_bytes)
        with watch.off_the_clock():
            checkpoints.after_step(model, optimizer, last_step)

    gradient_norms: list[Tensor] = []
    step_settings = {
        "micro_batches": config.micro_batches,
        "sync_micro_batches": config.sync_micro_batches,
        "reshard_after_backward": config.reshard_after_backward,
        "clip_norm": config.clip_norm,
        "norms": gradient_norms,
    }
    epochs, step_losses = [], []
    for epoch in range(first_epoch, config.epochs):
        batches = config_batches(
            dataset, config, rank, world_size, epoch, first_step=checkpoints.step - epoch * steps_per_epoch
        )
        watch.begin_epoch(epoch)
        batches = islice(batches, last_step - checkpoints.step)
        losses = train_one_epoch(model, batches, optimizer, after_step, **step_settings)
        losses = (sum_over_ranks(losses.double()) / world_size).tolist()
        step_losses += losses
        test_batches = evaluation_batches(dataset.test, rank=rank, world_size=world_size)
        test_sums = sum_over_ranks(evaluate(model, test_batches))
        seconds = max(gather_over_ranks(watch.epoch_seconds))
        epochs.append(epoch_record(config, epoch + 1, losses, seconds, test_sums))
        if checkpoints.step == last_step:
            break

    ranks = gather_over_ranks(watch.rank_record(rank))
    traces = gather_over_ranks(watch.trace)
    return RunRecord(
        config=config,
        data_source=dataset.source,
        versions=versions(),
        device=device.type,
        device_name=device_name(device),
        finished=gather_over_ranks(time_stamp())[0],
        world_size=world_size,
        epochs=tuple(epochs),
        first_step=first_step,
        step_losses=tuple(step_losses),
        gradient_norms=tuple(float(norm) for norm in gradient_norms),
        step_seconds=tuple(gather_over_ranks(watch.step_seconds)[0]),
        ranks=tuple(ranks),
        traces=tuple(trace for trace in traces if trace is not None),
    )


def load_rank_data(config: TrainConfig, device: torch.device) -> Dataset:
    """The images that `config` asks for, whole on every rank, on its device."""
    dataset = load_data(config.data_dir, train_images=config.train_images, test_images=config.test_images)
    if len(set(gather_over_ranks(dataset.source))) > 1:
        raise DataError("some ranks find MNIST and others do not; give every machine the same data folder")
    config.check_data_size(dataset.source, len(dataset.train), len(dataset.test))
    return Dataset(source=dataset.source, train=dataset.train.to(device), test=dataset.test.to(device))


def config_batches(
    dataset: Dataset, config: TrainConfig, rank: int, world_size: int, epoch: int, first_step: int = 0
) -> Batches:
    """This rank's training batches of one epoch: images (B / world_size, 1, 28, 28), labels (B / world_size,)."""
    return rank_batches(
        dataset.train,
        rank=rank,
        world_size=world_size,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        epoch=epoch,
        first_step=first_step,
    )


def epoch_record(
    config: TrainConfig, epoch: int, losses: list[float], seconds: float, test_sums: Tensor
) -> EpochRecord:
    """Means from sums: every image once, whatever the number of ranks."""
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


def time_stamp() -> str:
    """Date and time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__}
