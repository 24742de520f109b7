"""Gradients over ranks: when they are reduced, and how long the whole gradient is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
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


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients down together, so that their norm is at most `max_norm`; returns the norm before, shape ().

    It is the norm of the whole model's gradient, the same number on every rank: squares are summed over the
    slices, then over the ranks. Clipping each slice by a norm of its own would turn the gradient another way.
    """
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
