"""Rank functions that each show one idea about saving and resuming; notebook 06 displays them, then runs them."""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.profiler import record_function

from fsdp_helpers.checkpointing.checkpoint import load, save
from fsdp_helpers.checkpointing.folder import UNFINISHED, checkpoint_name
from fsdp_helpers.checkpointing.training_state import save_full
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.data.images import Dataset
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import gather_over_ranks, rank_device, sum_over_ranks
from fsdp_helpers.records import MemoryCurve, RunRecord, SavingRecord
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY
from fsdp_helpers.training.loop import train_step
from fsdp_helpers.training.worker import config_batches, load_rank_data, train_worker

Built = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def save_every_way(rank: int, world_size: int, config: TrainConfig, folder: str) -> list[SavingRecord]:
    """Save one training state in three ways in `folder`; return the time, disk bytes and memory that each takes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with trace_memory(rank_device()) as trace:
        model, optimizer = trained_for_a_step(rank, world_size, config)
        writing_group = dist.new_group(backend="gloo")  # for the thread that writes in the background
        ways = {
            "full": lambda path: save_full(f"{path}.pt", model, optimizer),
            "sharded": lambda path: save(path, model, optimizer),
            "asynchronous": lambda path: save(path, model, optimizer, wait=False, group=writing_group),
        }
        for way, save_it in ways.items():
            with record_function(way):
                finish(save_it(f"{folder}/traced-{way}"))
    # Tracing takes time, so each way is timed in another save, without a trace.
    return [time_saving(way, save_it, Path(folder, way), trace.last(way).curve) for way, save_it in ways.items()]


def time_saving(method: str, save_it: Callable[[str], Future | None], path: Path, curve: MemoryCurve) -> SavingRecord:
    dist.barrier()
    start_s = time.perf_counter()
    writing = save_it(str(path))
    waiting_s = time.perf_counter() - start_s
    finish(writing)
    dist.barrier()
    files = [*path.glob("*"), *path.parent.glob(f"{path.name}.pt")]
    return SavingRecord(
        method=method,
        waiting_s=max(gather_over_ranks(waiting_s)),
        total_s=max(gather_over_ranks(time.perf_counter() - start_s)),
        disk_bytes=sum(file.stat().st_size for file in files),
        extra_bytes=max(gather_over_ranks(curve.peak_bytes - curve.allocated_bytes[0])),
    )


def finish(writing: Future | None) -> None:
    if writing is not None:
        writing.result()


def load_shards(folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint, as `load` does at its core: every rank reads its own shards, whichever files they're in."""
    model_state, optimizer_state = get_state_dict(model, optimizer)  # tensors to fill
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in list(optimizer_state["state"]):
        if f"optimizer.state.{name}.step" not in saved:
            del optimizer_state["state"][name]  # it had no gradient yet: Adam starts with its first one
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)  # fills them
    options = StateDictOptions(strict=False)  # not every parameter has moments
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )


def resume_without_each(rank: int, world_size: int, config: TrainConfig, folder: str) -> dict[str, list[float]]:
    """Train half of the steps and save; then resume, leaving out one thing at a time. Return each case's losses."""
    dataset = load_rank_data(config, rank_device())
    half = config.max_steps // 2
    trained = build_sharded(config, seed=config.seed)
    losses = train_steps(rank, world_size, config, dataset, trained, first_step=0, count=half)
    model, optimizer, schedule = trained
    halfway = f"{folder}/halfway"
    save(halfway, model, optimizer, extra={"schedule": schedule.state_dict(), "step": half})
    cases = ("nothing", "optimizer", "schedule", "data position")
    return {
        f"lost: {lost}": losses + resume_without(lost, rank, world_size, config, dataset, halfway) for lost in cases
    }


def resume_without(
    lost: str, rank: int, world_size: int, config: TrainConfig, dataset: Dataset, folder: str
) -> list[float]:
    """Load into a new model, restore everything but `lost`, and train the other half of the steps."""
    model, optimizer, schedule = build_sharded(config, seed=config.seed + 1)  # as in a new process
    extra = load(folder, model, optimizer)
    if lost == "optimizer":
        optimizer, schedule = optimize_with_schedule(model, config)
        optimizer.param_groups[0]["lr"] = extra["schedule"]["_last_lr"][0]
    if lost == "schedule":
        optimizer.param_groups[0]["lr"] = config.learning_rate
    else:
        schedule.load_state_dict(extra["schedule"])
    first_step = 0 if lost == "data position" else extra["step"]
    count = config.max_steps - extra["step"]
    return train_steps(rank, world_size, config, dataset, (model, optimizer, schedule), first_step, count)


def train_and_be_killed(rank: int, world_size: int, config: TrainConfig, step: int) -> RunRecord:
    """Run `train_worker`, and kill rank 0 while it writes its part of step `step`'s checkpoint."""

    def end_while_writing(event: str, details: tuple) -> None:
        if event == "open" and str(details[0]).endswith(f"{UNFINISHED}{checkpoint_name(step)}/__0_0.distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(end_while_writing)  # Python reports every file that it opens
    return train_worker(rank, world_size, config)


def trained_for_a_step(rank: int, world_size: int, config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train for one step; return the model and the optimizer, which now have state worth saving."""
    dataset = load_rank_data(config, rank_device())
    model, optimizer, schedule = build_sharded(config, seed=config.seed)
    train_steps(rank, world_size, config, dataset, (model, optimizer, schedule), first_step=0, count=1)
    optimizer.zero_grad()
    return model, optimizer


def build_sharded(config: TrainConfig, seed: int) -> Built:
    torch.manual_seed(seed)
    model = APPLY_STRATEGY[config.strategy](build_model(config.model, dropout=config.dropout), rank_device(), config)
    return model, *optimize_with_schedule(model, config)


def optimize_with_schedule(
    model: nn.Module, config: TrainConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


def train_steps(
    rank: int, world_size: int, config: TrainConfig, dataset: Dataset, built: Built, first_step: int, count: int
) -> list[float]:
    """Take `count` steps with a falling learning rate; return the mean loss over the global batch for each step."""
    model, optimizer, schedule = built
    losses = []
    batches = config_batches(dataset, config, rank, world_size, epoch=0, first_step=first_step)
    for images, labels in islice(batches, count):
        losses.append(train_step(model, images, labels, optimizer))
        schedule.step()
    return (sum_over_ranks(torch.stack(losses)) / world_size).tolist()
