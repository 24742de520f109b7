"""Rank functions of the GPU checks."""

import gc
import os
import signal
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.records import RunRecord
from fsdp_helpers.training.loop import train_step
from fsdp_helpers.training.worker import config_batches, load_rank_data, set_up, train_worker


def collectives_on_device(rank: int, world_size: int) -> tuple[str, float, list[float], list[float]]:
    """Return this rank's device, and what three collectives of known numbers give there."""
    device = rank_device()
    own = torch.tensor([float(rank + 1)], device=device)
    total, every = own.clone(), torch.empty(world_size, device=device)
    dist.all_reduce(total)
    dist.all_gather_into_tensor(every, own)
    part = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(part, every)  # all put in 1, 2, ..., N: each gets N times its own
    return str(device), total.item(), every.tolist(), part.tolist()


def train_each(rank: int, world_size: int, configs: Sequence[TrainConfig]) -> list[RunRecord]:
    """Train each of `configs`, one after the other, in the same processes."""
    records = []
    for config in configs:
        gc.collect()  # sharded models are full of cycles
        records.append(train_worker(rank, world_size, config))
    return records


def train_and_look_at_cuda(rank: int, world_size: int, config: TrainConfig) -> tuple[str, bool]:
    """Train; then return this rank's device, and whether CUDA was initialized in its process."""
    train_worker(rank, world_size, config)
    return str(rank_device()), torch.cuda.is_initialized()


def where_shards_live(rank: int, world_size: int, config: TrainConfig) -> tuple[list[str], bool]:
    """Take one step; return the devices of this rank's shards, and whether all those on the host are pinned."""
    model, optimizer = set_up(rank, config)
    dataset = load_rank_data(config, rank_device())
    images, labels = next(iter(config_batches(dataset, config, rank, world_size, epoch=0)))
    train_step(model, images, labels, optimizer)
    shards = [part for part in map(_own_part, model.parameters()) if part.numel()]
    return sorted({part.device.type for part in shards}), all(part.is_pinned() for part in shards)


def _own_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def lose_rank_1(rank: int, world_size: int, way: str) -> None:
    """Stop or kill rank 1 while the others wait for it in a collective on their devices."""
    ones = torch.ones(1, device=rank_device())
    dist.all_reduce(ones)  # all are there, and connected
    ones.item()
    if rank == 1:
        os.kill(os.getpid(), {"stopped": signal.SIGSTOP, "dead": signal.SIGKILL}[way])
    dist.all_reduce(ones)
    ones.item()  # NCCL only queues; this waits
