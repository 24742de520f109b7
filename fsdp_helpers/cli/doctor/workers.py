"""The functions that the checks run on ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.ranks.group import rank_device

STEPS, WIDTH, DEPTH = 4, 256, 3
Collectives = tuple[str, float, list[float], list[float]]


def collectives_on_device(rank: int, world_size: int) -> Collectives:
    """Run three collectives on known numbers; return this rank's device and the collectives' results."""
    device = rank_device()
    own = torch.tensor([float(rank + 1)], device=device)
    total, every = own.clone(), torch.empty(world_size, device=device)
    dist.all_reduce(total)
    dist.all_gather_into_tensor(every, own)
    part = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(part, every)  # every rank contributes 1, 2, ..., N, so each gets N times its own
    return str(device), total.item(), every.tolist(), part.tolist()


def expected_of_collectives(device: str, world_size: int) -> list[Collectives]:
    """Return the correct results of `collectives_on_device`, one per rank."""
    every = [rank + 1.0 for rank in range(world_size)]
    names = [device if device == "cpu" else f"{device}:{rank}" for rank in range(world_size)]
    return [(name, sum(every), every, [world_size * own]) for name, own in zip(names, every, strict=True)]


def train_in_three_ways(rank: int, world_size: int) -> dict[str, list[float]]:
    """Return the same model's losses over its first steps under DDP, under FSDP2, and under FSDP2 in bf16."""
    return {way: losses_of(way, rank, world_size) for way in ("ddp", "fsdp2", "bf16")}


def losses_of(way: str, rank: int, world_size: int) -> list[float]:
    device = rank_device()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]).to(device)
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if way == "bf16" else MixedPrecisionPolicy()
        mesh = init_device_mesh(device.type, (world_size,))
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(inputs).float(), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
