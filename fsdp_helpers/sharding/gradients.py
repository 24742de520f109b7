"""Gradients over ranks: when they are reduced, and how long the whole gradient is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def hold_back_reduction(model: nn.Module) -> Iterator[None]:
    """Within the block, forward and backward add up gradients on this rank alone.

    The first backward after the block reduces the sum. Until then FSDP keeps whole gradients instead of slices.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Within the block, backward leaves FSDP2's units whole, so that the next forward need not gather them again.

    The first backward after the block frees them. Until then every unit is whole at once.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_reshard_after_backward(False)
    try:
        yield
    finally:
        model.set_reshard_after_backward(True)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients down together, so that their norm is at most `max_norm`; returns the norm before, shape ().

    It is the norm of the whole model's gradient, the same number on every rank: squares are summed over the slices,
    then over the ranks that share them. Clipping each slice by a norm of its own would turn the gradient another way.
    `clip_grad_norm_`, of FSDP1 and of `torch.nn.utils`, does the same in fp32; on a CPU that loses digits with size,
    1e-5 of the norm for a million values, 1e-2 for a hundred million, so here the squares are summed in fp64.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in own]
    squares = sum((norm.square() for norm in norms), start=torch.zeros((), dtype=torch.float64))
    if (sharing := ranks_that_share(model)) is not None:
        group, device = sharing
        squares = squares.to(device)  # offloaded gradients lie on the host, and the ranks meet on the device
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt().float()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in own:
        gradient.mul_(scale.to(gradient.device))
    return norm


def ranks_that_share(model: nn.Module) -> tuple[dist.ProcessGroup, torch.device] | None:
    """The ranks whose slices make one whole gradient, and where they meet; None where each rank has all of it."""
    if isinstance(model, FSDPModule):
        parameter = next(model.parameters())
        sharded = next(dim for dim, placement in enumerate(parameter.placements) if placement.is_shard())
        return parameter.device_mesh.get_group(sharded), torch.device(parameter.device_mesh.device_type)
    if isinstance(model, FullyShardedDataParallel) and model.sharding_strategy != ShardingStrategy.NO_SHARD:
        return model.process_group, model.compute_device
    return None
