"""The small job that the failures break: a model, its units, and a few images."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

WIDTH = 8
ALL_IMAGES = 8
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # its name before 2.15


def small_model(seed: int = 0) -> nn.Sequential:
    """Return a model of three linear layers; the same seed gives the same weights."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)]
    return nn.Sequential(*layers)


def cpu_mesh() -> DeviceMesh:
    """Return a CPU mesh of all ranks; without a mesh, `fully_shard` looks for a GPU."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def in_units(model: nn.Module) -> FSDPModule:
    """Make each linear layer a unit, and make the model the root."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def images(count: int = ALL_IMAGES) -> Tensor:
    """Return `count` random images of eight values each, the same ones on every call; shape (count, 8)."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, all-gathered if it's sharded; every rank has to call this function."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_norm(model: nn.Module) -> float:
    """Return the norm of the full gradient, sharded or not; the norm is the same on every rank."""
    return float(whole(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])))
