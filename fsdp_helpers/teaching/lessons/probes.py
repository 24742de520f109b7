"""Small rank functions that look at one thing each: what the notebooks show, and then run."""

import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.distributed.tensor import DTensor

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.sharding.gradients import clip_gradients
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY
from fsdp_helpers.training.loop import add_up_gradients
from fsdp_helpers.training.worker import first_batches


def nest_by_hand(rank: int, world_size: int) -> str:
    """Use FSDP1 without a policy: `wrap` marks the units, and `enable_wrap` says what to wrap them with."""
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=rank_device(), use_orig_params=True):
        model = wrap(
            nn.Sequential(
                wrap(nn.Linear(784, 512)),  # a unit
                nn.ReLU(),
                nn.Linear(512, 10),  # not wrapped: belongs to the root
            )
        )
    return str(model)


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


def dtypes_in_forward(rank: int, world_size: int, way: str) -> dict[str, str]:
    """Return the dtypes of a weight in forward, of the layers' outputs, of the loss and of the gradient that is kept.

    `way` is "policy" (FSDP's, for the whole model), "norm apart" (a policy of its own for the norm) or "autocast".
    """
    layers = {"Linear": nn.Linear(8, 8), "LayerNorm": nn.LayerNorm(8)}
    model = nn.Sequential(*layers.values()).to(rank_device())
    mesh = init_device_mesh(rank_device().type, (world_size,))
    if way == "norm apart":
        fully_shard(layers["LayerNorm"], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy() if way == "autocast" else bf16)

    found = {}
    layers["Linear"].register_forward_hook(lambda layer, given, result: found.update(weight=layer.weight.dtype))
    for name, layer in layers.items():
        layer.register_forward_hook(lambda layer, given, result, name=name: found.update({name: result.dtype}))
    with torch.autocast(rank_device().type, dtype=torch.bfloat16, enabled=way == "autocast"):
        output = model(torch.ones(2, 8, device=rank_device()))
        loss = F.mse_loss(output, torch.zeros_like(output))
    loss.backward()
    found |= {"loss": loss.dtype, "gradient": layers["Linear"].weight.grad.dtype}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def add_up_without(rank: int, world_size: int, stopped: int) -> float:
    """Add up ones over the ranks, one of which is stopped before, as by a debugger or a machine that hangs."""
    total = torch.ones(1)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()
