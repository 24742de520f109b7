"""The strategies, one function each, all with the same signature: `apply_*(model, device, config) -> model`.

Each function takes a freshly initialized model on the CPU, the same on every rank, and returns it ready to train.
"""

import os
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.group import BLOCKING_WAIT
from fsdp_helpers.sharding.recompute import checkpoint_activations, with_wrapper
from fsdp_helpers.sharding.wrapping import Policy, choose_units, holders_of_ties, plain_name, size_policy

SHARDING_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,  # ZeRO-3: parameters are resharded after forward
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,  # parameters stay unsharded from forward to the end of backward
    "hybrid": ShardingStrategy.HYBRID_SHARD,  # shards within a group of ranks, copies across groups
    "none": ShardingStrategy.NO_SHARD,  # full copies, like DDP
}
BACKWARD_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def apply_local(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Keep the full model, in one process."""
    return recompute_units(model, config).to(device)


def apply_ddp(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Give every rank the full model; gradients are averaged in buckets while backward is still running."""
    return DistributedDataParallel(
        recompute_units(model, config).to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=config.bucket_view,  # gradients are views of buckets: saves 4 bytes per parameter
    )


def apply_fsdp(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Give every rank a shard of the model; the full model is one unit, unsharded for forward and backward."""
    return shard_with_api(model, device, config, policy=None)


def apply_fsdp_auto_wrap(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Give every rank a shard of each unit; units are chosen by size and unsharded one after another."""
    return shard_with_api(model, device, config, policy=size_policy(config.min_num_params, holders_of_ties(model)))


def apply_fsdp_offload(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Shard like auto-wrap, but keep shards, their gradients and the optimizer state in host memory when not in use."""
    return shard_with_api(
        model, device, config, policy=size_policy(config.min_num_params, holders_of_ties(model)), offload=True
    )


APPLY_STRATEGY = {
    "local": apply_local,
    "ddp": apply_ddp,
    "fsdp": apply_fsdp,
    "fsdp-auto-wrap": apply_fsdp_auto_wrap,
    "fsdp-offload": apply_fsdp_offload,
}


def shard_with_api(
    model: nn.Module, device: torch.device, config: TrainConfig, *, policy: Policy | None, offload: bool = False
) -> nn.Module:
    """Shard `model` with the API that `config` names; `policy` chooses the units below the root.

    Raises ValueError for a model without parameters.
    """
    if not any(parameter.numel() for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to shard")
    if policy is not None and config.activation_checkpointing != "none":
        units = [model.get_submodule(name) for name in choose_units(model, policy)]
        model = recompute_units(model, config)
        # The same units, now in their wrappers
        policy = partial(lambda_auto_wrap_policy, lambda_fn=with_wrapper(model, units).__contains__)
    else:
        model = recompute_units(model, config)
    shard_with = shard_fsdp1 if config.api == "fsdp1" else shard_fsdp2
    return shard_with(model, device, config, policy=policy, offload=offload)


def recompute_units(model: nn.Module, config: TrainConfig) -> nn.Module:
    """If `config` enables activation checkpointing, wrap the units that the size policy chooses.

    Call this before sharding, so that backward unshards a unit only once, for both its second forward pass
    and its backward pass.
    """
    if config.activation_checkpointing == "none":
        return model
    units = choose_units(model, size_policy(config.min_num_params, holders_of_ties(model)))
    return checkpoint_activations(model, units, config.activation_checkpointing)


def shard_fsdp1(
    model: nn.Module, device: torch.device, config: TrainConfig, *, policy: Policy | None, offload: bool
) -> nn.Module:
    """Wrap every unit in a `FullyShardedDataParallel`, which keeps the unit's parameters in one flat tensor."""
    # All-gather and compute in bf16; store, reduce and update in fp32, where small updates aren't lost to rounding.
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with warnings.catch_warnings():
        # With one rank, there's nothing to shard. FSDP1 warns and continues with NO_SHARD, which is what we want.
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        # Sharding "none" is here to be compared with the others, deprecated or not.
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
        return FullyShardedDataParallel(
            model,
            device_id=device,  # needed even on the CPU: without it, FSDP1 looks for an accelerator
            auto_wrap_policy=policy,
            sharding_strategy=SHARDING_STRATEGIES[config.sharding],
            device_mesh=make_mesh(device, config),  # with a mesh, its state dict holds DTensors, like FSDP2's
            backward_prefetch=BACKWARD_PREFETCH[config.backward_prefetch],
            cpu_offload=CPUOffload(offload_params=True) if offload else None,
            mixed_precision=bf16 if config.precision == "bf16" else None,
            use_orig_params=True,  # the optimizer and the state dict see the model's own names and shapes
        )


def shard_fsdp2(
    model: nn.Module, device: torch.device, config: TrainConfig, *, policy: Policy | None, offload: bool
) -> nn.Module:
    """Apply `fully_shard` in place: every parameter becomes a DTensor sharded along its first dimension.

    The root isn't resharded after forward, because backward needs it first.
    """
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    on_host = CPUOffloadPolicy(pin_memory=device.type == "cuda")  # pinning needs an accelerator
    settings = {
        "mesh": make_mesh(device, config),
        "offload_policy": on_host if offload else OffloadPolicy(),
        "mp_policy": bf16 if config.precision == "bf16" else MixedPrecisionPolicy(),
    }
    frees = config.reshard_after_forward and config.sharding != "grad-op"
    for name in choose_units(model, policy):
        fully_shard(model.get_submodule(name), reshard_after_forward=frees, **settings)
    return fully_shard(model, **settings)


def rebuild_ddp_buckets(model: nn.Module, images: Tensor) -> None:
    """Make DDP arrange its buckets as it does after its first step; for other strategies, do nothing.

    DDP rearranges its buckets after the first backward pass, and the last bit of a sum over three or more ranks
    depends on where in a bucket the gradient is. So a resumed run has to start with the final buckets. This runs one
    forward pass on `images`, (N, 1, 28, 28), and one backward pass, and discards the gradients.
    """
    if isinstance(model, DistributedDataParallel):
        model(images).sum().backward()
        model.zero_grad()


def wait_for_buckets(model: nn.Module) -> None:
    """Make DDP's ranks wait for each bucket if a timeout is set on CUDA; other strategies wait anyway.

    DDP never calls `wait()`, which raises if a rank is missing. DDP makes only later kernels wait, so the other ranks
    would hang the next time they synchronize with the GPU.
    """
    raises_on_timeout = os.environ.get(BLOCKING_WAIT, "0") not in ("", "0")
    if isinstance(model, DistributedDataParallel) and raises_on_timeout:
        model.register_comm_hook(None, average_and_wait)


def average_and_wait(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket's gradients, a flat tensor (num_values,), across all ranks; return a future that's done."""
    buffer = bucket.buffer()
    dist.all_reduce(buffer.div_(dist.get_world_size()))
    done = torch.futures.Future()
    done.set_result(buffer)
    return done


def unit_names(model: nn.Module) -> list[str]:
    """Return the names that the FSDP units in `model` have in the plain model; the root is called "root".

    A list of modules that `fully_shard` was given is one unit, with the name of the first. A module whose parameters
    all belong to other units is none: it gathers nothing.
    """
    sharded = {
        name: fully_shard.state(module) if isinstance(module, FSDPModule) else module
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel | FSDPModule)
    }
    owners = set()
    for name, _ in model.named_parameters():
        while name and name not in sharded:
            name = name.rpartition(".")[0]  # the module that has the parameter, then the one around it
        owners.add(sharded.get(name))
    units = {}
    for name, state in sharded.items():
        if state in owners:
            units.setdefault(state, plain_name(name) or "root")
    return list(units.values())


def count_units(model: nn.Module) -> int:
    """Count the FSDP units in `model`, the root included; 0 if the model isn't sharded."""
    return len(unit_names(model))


def make_mesh(device: torch.device, config: TrainConfig) -> DeviceMesh:
    """Return a mesh with one dimension for all ranks or, for "hybrid", two: replicas (first) and shards (second)."""
    if config.sharding == "hybrid":
        return init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (dist.get_world_size(),))
