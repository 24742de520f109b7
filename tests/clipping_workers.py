"""Workers that clip gradients which not every rank shares in the same way."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_helpers.models.series import build_model
from fsdp_helpers.sharding.gradients import clip_gradients

BLOCK_PLAN = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}


def clip_in_two_dimensions(rank, world_size, max_norm):
    """08's model in one process and on a mesh of two dimensions: (its norm, its norm after clipping) of both."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    norms = []
    for sharded in (False, True):
        torch.manual_seed(0)
        images, model = torch.randn(8, 1, 28, 28), build_model("vit-mnist")
        if sharded:
            for block in model.blocks:
                parallelize_module(block, mesh["tensor"], BLOCK_PLAN)
                fully_shard(block, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])
            images = images.chunk(mesh["data"].size())[mesh.get_local_rank("data")]
        model(images).square().mean().backward()
        norms.append((clip_gradients(model, max_norm).item(), clip_gradients(model, max_norm).item()))
    return norms


def clip_beside_an_ignored_parameter(rank, world_size):
    """Two layers, of which FSDP2 ignores the first's weight; the norm, and that of the same gradients unsharded."""
    norms = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params={model[0].weight})
        model(torch.ones(2, 3)).square().sum().backward()  # the same on every rank
        norms.append(clip_gradients(model, max_norm=1e6).item())
    return norms
