"""Small rank functions that look at one thing each: what the notebooks show, and then run."""

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.sharding.gradients import clip_gradients
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY
from fsdp_helpers.training.loop import add_up_gradients
from fsdp_helpers.training.worker import first_batches


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


def add_up_without(rank: int, world_size: int, stopped: int) -> float:
    """Add up ones over the ranks, one of which is stopped before, as by a debugger or a machine that hangs."""
    total = torch.ones(1)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()
