"""Rank functions for notebook 10: a suspended rank, and hybrid copies that start with different weights."""

import os
import signal
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.ranks.group import rank_device


def add_up_without(rank: int, world_size: int, stopped: int) -> float:
    """Suspend one rank, as a debugger or a frozen machine would, then all-reduce a 1 from every rank."""
    total = torch.ones(1)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()


def copies_apart(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """Return how much two hybrid copies differ if a shard has the same seed in both, and if each rank has its own."""
    warnings.filterwarnings("ignore", message="DTensor random operators")  # on CPUs, each rank draws its own values
    shard = rank % (world_size // 2)
    return {"a seed per shard": train_copies(shard, world_size), "a seed per rank": train_copies(rank, world_size)}


def train_copies(seed: int, world_size: int) -> dict[str, float]:
    """Start two hybrid copies from meta; return the largest difference between them, before and after 5 steps."""
    mesh = init_device_mesh(rank_device().type, (2, world_size // 2), mesh_dim_names=("copies", "shards"))
    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    model = fully_shard(layer, mesh=mesh).to_empty(device=rank_device())
    torch.manual_seed(seed)
    model.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"at the start": gap_between_copies(model.weight.to_local(), mesh["copies"].get_group())}
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device=rank_device())).square().mean().backward()
        optimizer.step()
    return found | {"after 5 steps": gap_between_copies(model.weight.to_local(), mesh["copies"].get_group())}


def gap_between_copies(tensor: Tensor, group: dist.ProcessGroup) -> float:
    """Return the largest difference between the tensors of the two ranks in `group`."""
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.detach().clone(), group=group)
    return (both[0] - both[1]).abs().max().item()
