"""Workers that clip gradients which not every rank shares in the same way."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.sharding.gradients import clip_gradients
from fsdp_helpers.teaching.lessons import real_model
from fsdp_helpers.training.worker import first_batches


def clip_by_the_package(rank, world_size, config, max_norm):
    """08's model on a mesh of two dimensions: the norm of the first gradient, and after clipping."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = real_model.shard_in_two_dimensions(real_model.seeded_model(config), mesh)
    images, labels = first_batches(mesh.get_local_rank("data"), mesh["data"].size(), config)[0]
    F.cross_entropy(model(images), labels).backward()
    return clip_gradients(model, max_norm).item(), clip_gradients(model, max_norm).item()


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
