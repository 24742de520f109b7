"""Small rank functions that look at one thing each: what the notebooks show, and then run."""

import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.sharding.gradients import clip_gradients
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY
from fsdp_helpers.training.loop import add_up_gradients
from fsdp_helpers.training.worker import first_batches


def say_hello(rank: int, world_size: int) -> dict:
    """Return who this rank is, and whether the sum over all ranks comes out right."""
    ones = torch.ones(1, device=rank_device())
    dist.all_reduce(ones)
    return {
        "rank": rank,
        "process": os.getpid(),
        "device": str(rank_device()),
        "threads": torch.get_num_threads(),
        "ranks that answered": int(ones),
    }


def show_all_reduce(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return what this rank puts into an all-reduce, and what it gets back."""
    values = torch.tensor([1.0, 10.0, 100.0], device=rank_device()) * (rank + 1)
    before = values.tolist()
    dist.all_reduce(values, op=dist.ReduceOp.SUM)  # in place, and the same on every rank afterward
    return before, values.tolist()


def gradient_norm(rank: int, world_size: int, config: TrainConfig, average: bool) -> float:
    """Return the norm of the first step's gradient after an all-reduce, divided by the number of ranks or not."""
    images, labels = first_batches(rank, world_size, config)[0]
    torch.manual_seed(config.seed)
    model = build_model(config.model, dropout=False).to(rank_device())
    F.cross_entropy(model(images), labels).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(gradient)
    return float(gradient.norm() / (world_size if average else 1))


def describe_sharded(rank: int, world_size: int, config: TrainConfig) -> tuple[str, list[tuple[str, str, list, list]]]:
    """Return the printed sharded model; and name, type, whole shape and local shape of each parameter."""
    model = APPLY_STRATEGY[config.strategy](build_model(config.model), rank_device(), config)
    parameters = []
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        parameters.append((name, type(parameter).__name__, list(parameter.shape), list(local.shape)))
    return str(model), parameters


def norms_of_a_gradient(rank: int, world_size: int, config: TrainConfig) -> tuple[float, float]:
    """Return the norm of this rank's shard of the first step's gradient, and the norm that clipping works with."""
    images, labels = first_batches(rank, world_size, config)[0]
    torch.manual_seed(config.seed)
    model = APPLY_STRATEGY[config.strategy](build_model(config.model, dropout=config.dropout), rank_device(), config)
    add_up_gradients(model, images, labels)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    own_norm = torch.cat([gradient.flatten() for gradient in own]).double().norm()
    return own_norm.item(), clip_gradients(model, max_norm=1.0).item()


def train_your_own(rank: int, world_size: int) -> list[float]:
    """Train any module in any loop: here two transformer layers, each a unit, and two steps of SGD."""
    device = rank_device()
    layers = [nn.TransformerEncoderLayer(128, nhead=4, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # after sharding: it must see the shards

    losses = []
    for _ in range(2):  # the second step is a steady one
        with record_function("forward"):  # these names are for the figure; without them it has no phases
            optimizer.zero_grad()
            loss = model(torch.ones(8, 64, 128, device=device)).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            optimizer.step()
        losses.append(loss.item())
    return losses


def losses_when_built(rank: int, world_size: int, when: str) -> list[float]:
    """Return four losses of one linear layer, whose optimizer is built "before" or "after" `fully_shard`."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(rank_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # it holds the whole parameters ...
    fully_shard(model, mesh=init_device_mesh(rank_device().type, (world_size,)))  # ... now shards
    if when == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=rank_device())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def add_up_without(rank: int, world_size: int, stopped: int) -> float:
    """Add up ones over the ranks, one of which is stopped before, as by a debugger or a machine that hangs."""
    total = torch.ones(1)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()
