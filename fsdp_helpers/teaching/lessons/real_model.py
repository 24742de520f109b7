"""Rank functions about sharding a real model, one idea each: what notebook 08 shows, and then runs."""

import logging
import os
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.models.shapes import ViTShape
from fsdp_helpers.models.vit import Block, ViT
from fsdp_helpers.ranks.group import rank_device, sum_over_ranks
from fsdp_helpers.sharding.strategies import unit_names
from fsdp_helpers.teaching.lessons.starts import shard_blocks
from fsdp_helpers.training.worker import first_batches

LEARNING_RATE = 0.01  # of SGD, which sees whether a gradient is right; Adam would hide a wrong factor


def cut_by_class(rank: int, world_size: int, shape: ViTShape) -> dict[str, list[str]]:
    """Return the units of three ways to say "one per block": FSDP1's two policies, and FSDP2's loop over the blocks."""
    policies = {
        "FSDP1, ModuleWrapPolicy": ModuleWrapPolicy({Block}),
        "FSDP1, transformer_auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    }
    units = {}
    for name, policy in policies.items():
        wrapped = FullyShardedDataParallel(
            ViT(shape), auto_wrap_policy=policy, device_id=rank_device(), use_orig_params=True
        )
        units[name] = unit_names(wrapped)
    mesh = init_device_mesh(rank_device().type, (world_size,))
    model = ViT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return units | {"FSDP2, a loop": unit_names(model)}


# ---------------------------------------------------------------- prefetch


def order_of_forward(rank: int, world_size: int, shape: ViTShape, ahead: int) -> list[str]:
    """Return a forward's order of events: "gather 1" for block 1's all-gather, "compute 1" for its arithmetic.

    Every block asks for the gathers of the next `ahead` blocks as soon as it is whole itself; 0 leaves FSDP2 as it is.
    """
    model = shard_blocks(ViT(shape).to(rank_device()), init_device_mesh(rank_device().type, (world_size,)))
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        if ahead:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        block.norm1.register_forward_pre_hook(partial(note, f"compute {index}"))
    images = torch.zeros(2, shape.channels, shape.image_size, shape.image_size, device=rank_device())
    model(images)  # the first forward also sets up; the second is a usual one
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler's library greets on standard error
    # The program's own order, also where there is a GPU; acc_events, since torch 2.11 warns without it.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        model(images)
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    names = [event.name.replace("FSDP::all_gather (blocks.", "gather ").removesuffix(")") for event in events]
    return [name for name in names if name.startswith(("gather ", "compute "))]


def note(name: str, module: nn.Module, inputs: tuple) -> None:
    """Leave a mark in the profiler's trace."""
    with record_function(name):
        pass


# ---------------------------------------------------------------- steps of training


def sgd_losses(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Take a step for each batch; return the mean of each step's loss over the ranks."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return (sum_over_ranks(torch.stack(losses)) / torch.distributed.get_world_size()).tolist()


def seeded_model(config: TrainConfig) -> nn.Module:
    """Build the model with the same values on every rank."""
    torch.manual_seed(config.seed)
    return build_model(config.model).to(rank_device())


def losses_compiled(rank: int, world_size: int, config: TrainConfig, backend: str | None) -> list[float]:
    """Return the losses of a model whose blocks are compiled one by one and then sharded; None compiles nothing."""
    model = seeded_model(config)
    # Ranks share the cores: one compiler for each instead of a pool, no trial of every kind of vector first, and no
    # compiled headers, which would stay in the folder for temporary files.
    sooner = {"compile_threads": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # else it says that there is no GPU
    if backend is not None:
        for block in model.blocks:
            # In place; equal blocks share what was compiled for the first.
            block.compile(backend=backend, options=sooner if backend == "inductor" else None)
    shard_blocks(model, init_device_mesh(rank_device().type, (world_size,)))
    return sgd_losses(model, first_batches(rank, world_size, config))


# ---------------------------------------------------------------- tensor parallelism


def block_plan() -> dict[str, ParallelStyle]:
    """Return how tensor parallelism cuts the layers of a block."""
    return {
        "attention.qkv": ColwiseParallel(),  # each rank some of the heads,
        "attention.out": RowwiseParallel(),  # and an all-reduce puts their outputs together
        "mlp.0": ColwiseParallel(),  # each rank a part of the hidden layer,
        "mlp.2": RowwiseParallel(),  # and an all-reduce
    }


def shard_in_two_dimensions(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Share the arithmetic of each block within "tensor", and what its ranks keep within "data"."""
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], block_plan())  # first: what a rank computes
        fully_shard(block, mesh=mesh["data"])  # then: what it keeps of that
    return fully_shard(model, mesh=mesh["data"])


def train_in_two_dimensions(
    rank: int, world_size: int, config: TrainConfig
) -> tuple[list[float], list[tuple[str, str, list[int], list[int]]], dict[str, int]]:
    """Return the losses with pairs of ranks that share each block's arithmetic, and FSDP across the pairs.

    Also name, placements, whole shape and local shape of one block's parameters; and a last step's collectives.
    """
    mesh = init_device_mesh(rank_device().type, (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = shard_in_two_dimensions(seeded_model(config), mesh)
    # Both ranks of a pair see the same images.
    batches = first_batches(mesh.get_local_rank("data"), mesh["data"].size(), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = sgd_losses(model, batches[:-1], optimizer)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # said of what the counting hands on
    with CommDebugMode() as seen:
        losses += sgd_losses(model, batches[-1:], optimizer)
    parameters = [
        (name, str(own.placements), list(own.shape), list(own.to_local().shape))
        for name, own in model.blocks[0].named_parameters()
        if isinstance(own, DTensor)
    ]
    return losses, parameters, {op.__name__: count for op, count in seen.get_comm_counts().items()}


def losses_unsharded(rank: int, world_size: int, config: TrainConfig) -> list[float]:
    """Return the losses of the same steps in one process."""
    return sgd_losses(seeded_model(config), first_batches(rank, world_size, config))
