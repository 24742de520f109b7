"""Gradients across ranks: when they're reduced, and the norm of the full gradient."""

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
    """Within the block, accumulate gradients on this rank without reducing them.

    The first backward pass after the block reduces the sum. Until then, FSDP holds full gradients instead of shards.
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
def keep_unsharded(model: nn.Module) -> Iterator[None]:
    """Within the block, keep FSDP2's units unsharded after backward, so the next forward pass needs no all-gathers.

    The first backward pass after the block reshards them. Until then, all units are unsharded at the same time.
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
    """Scale all gradients down together so that their norm is at most `max_norm`; return the original norm, shape ().

    This is the norm of the full gradient, the same on every rank: squares are summed over a rank's shards, then
    across ranks. Clipping each shard by its own norm would change the gradient's direction. In FSDP1 and
    `torch.nn.utils`, `clip_grad_norm_` computes the norm in fp32. On a CPU, the fp32 error grows with the model: it's
    1e-5 of the norm for a million values, and 1e-2 for a hundred million. So the squares are summed in fp64 here. For a
    parameter that FSDP2 ignores, this rank's gradient is used, so average that gradient across ranks first.
    """
    own = []
    squares = {}  # groups that gradients are sharded over -> sum of squares of this rank's shards of those gradients
    for parameter in model.parameters():
        groups, device = ranks_that_share(model, parameter)
        squares.setdefault(groups, torch.zeros((), dtype=torch.float64, device=device))
        if parameter.grad is not None:
            own.append(parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
            norm = torch.linalg.vector_norm(own[-1], dtype=torch.float64)
            # Offloaded gradients are on the host, but the collective needs the device.
            squares[groups] += norm.square().to(device)
    for groups, kept in squares.items():
        for group in groups:
            dist.all_reduce(kept, group=group)
    norm = sum(squares.values()).sqrt().float()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in own:
        gradient.mul_(scale.to(gradient.device))
    return norm


def ranks_that_share(model: nn.Module, parameter: Tensor) -> tuple[tuple[dist.ProcessGroup, ...], torch.device]:
    """Return the rank groups that `parameter` is sharded over (one per sharded mesh dimension), and the device.

    If there are no groups, each rank has the full parameter.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        sharded = [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]
        return tuple(mesh.get_group(dim) for dim in sharded), torch.device(mesh.device_type)
    if isinstance(model, FullyShardedDataParallel) and model.sharding_strategy != ShardingStrategy.NO_SHARD:
        return (model.process_group,), model.compute_device
    return (), parameter.device
