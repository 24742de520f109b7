"""Groups, meshes and models that don't fit together on all ranks, or are set up twice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, images, small_model

# ---------------------------------------------------------------- a second start


def start_again(rank: int, world_size: int) -> Numbers:
    dist.init_process_group("gloo")  # as the framework, or a cell, already did
    return {"ranks": dist.get_world_size()}


def start_if_needed(rank: int, world_size: int) -> Numbers:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {"ranks": dist.get_world_size()}


def two_ranks() -> Numbers:
    return {"ranks": 2}


# ---------------------------------------------------------------- a mesh of the wrong size


def mesh_for_eight(rank: int, world_size: int) -> Numbers:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    return {"ranks": mesh.size()}


def mesh_for_all(rank: int, world_size: int) -> Numbers:
    tp = 2
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    return {"ranks": mesh.size()}


# ---------------------------------------------------------------- a source outside the group


def name_a_global_rank(rank: int, world_size: int) -> Numbers:
    last, value = dist.new_group([world_size - 1]), torch.ones(1)
    dist.broadcast(value, src=0, group=last)
    return {"value": value.item()}


def name_a_rank_of_the_group(rank: int, world_size: int) -> Numbers:
    last, value = dist.new_group([world_size - 1]), torch.ones(1)
    if dist.get_rank(last) >= 0:
        dist.broadcast(value, group_src=0, group=last)
    return {"value": value.item()}


def the_value() -> Numbers:
    return {"value": 1.0}


# ---------------------------------------------------------------- a model of each rank's own


def grow_on_rank_0(rank: int, world_size: int) -> Numbers:
    model, grows = small_model(), rank == 0  # only rank 0 has read the settings
    if grows:
        model.append(nn.Linear(2, 2))
    return {"parameters": len(list(DistributedDataParallel(model).parameters()))}


def grow_on_every_rank(rank: int, world_size: int) -> Numbers:
    model, grows = small_model(), [rank == 0]
    dist.broadcast_object_list(grows)
    if grows[0]:
        model.append(nn.Linear(2, 2))
    return {"parameters": len(list(DistributedDataParallel(model).parameters()))}


def four_layers() -> Numbers:
    return {"parameters": 4 * 2}


# ---------------------------------------------------------------- predictions of different lengths


def predictions_of(rank: int) -> torch.Tensor:
    return torch.arange(3.0) if rank == 0 else torch.arange(2.0)  # the last batch is smaller


def gather_as_they_are(rank: int, world_size: int) -> Numbers:
    mine = predictions_of(rank)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return {"predictions": sum(map(len, gathered)), "sum": float(sum(part.sum() for part in gathered))}


def pad_and_gather(rank: int, world_size: int) -> Numbers:
    mine = predictions_of(rank)
    lengths = [torch.tensor(0) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor(len(mine)))
    gathered = [torch.empty(int(max(lengths))) for _ in range(world_size)]
    dist.all_gather(gathered, pad(mine, (0, int(max(lengths)) - len(mine))))
    gathered = [part[:length] for part, length in zip(gathered, lengths, strict=True)]
    return {"predictions": sum(map(len, gathered)), "sum": float(sum(part.sum() for part in gathered))}


def all_predictions() -> Numbers:
    both = torch.cat([predictions_of(0), predictions_of(1)])
    return {"predictions": len(both), "sum": both.sum().item()}


# ---------------------------------------------------------------- units in the wrong order


def shard_each_module(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for module in model.modules():  # the root comes first
        fully_shard(module, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def shard_blocks_then_the_root(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for module in model.children():
        if isinstance(module, nn.Linear) and not isinstance(module, FSDPModule):
            fully_shard(module, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def outputs_alone() -> Numbers:
    return {"sum of outputs": small_model()(images()).sum().item()}


# ---------------------------------------------------------------- parameters on two meshes


def half_parallel() -> nn.Module:
    """Return a model whose first layer is tensor-parallel, so that its parameters are on a mesh with two dimensions."""
    mesh, model = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), small_model()
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    model(images()).square().mean().backward()
    return model


def clip_all_at_once(rank: int, world_size: int) -> Numbers:
    model = half_parallel()
    return {"gradient norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()}


def clip_mesh_by_mesh(rank: int, world_size: int) -> Numbers:
    by_mesh = {}
    for parameter in half_parallel().parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in group]).full_tensor() for group in by_mesh.values()]
    norm = nn.utils.get_total_norm(norms)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, 1.0, norm)
    return {"gradient norm": norm.item()}


def norm_alone() -> Numbers:
    model = small_model()
    model(images()).square().mean().backward()
    return {"gradient norm": nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()}
