"""Tools that set up FSDP2 for you: their settings next to plain torch, and accelerate on CPU ranks. For notebook 14."""

import importlib.util
import json
import os
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_helpers.ranks.group import rank_device
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons.from_ddp import build_model, make_optimizer, mean_over_ranks, own_bytes, shard

STEPS = 5
BATCH = 24  # images per step, over all ranks

# The line of plain torch, then what stands for it in accelerate's `fsdp_config` (1.15), in the dictionary that
# Trainer takes as `fsdp_config` (transformers 5.23), with Lightning's ModelParallelStrategy (2.6), and the fields of
# torchtitan's configuration, which is Python since February 2026 (its pull request 2386) and was TOML before.
# "yours": you write that line yourself.
SETTINGS = [
    (
        "`fully_shard`, not FSDP1",
        "`fsdp_version: 2`; 1 is the default",
        "`fsdp=True`; 2 is the default",
        "`strategy=ModelParallelStrategy()`",
        "always",
    ),
    (
        "`init_device_mesh`",
        "`parallelism_config`",
        "`parallelism_config`",
        "`data_parallel_size`, `tensor_parallel_size`",
        "`data_parallel_shard_degree`, `..._replicate_degree`",
    ),
    (
        "`for block in blocks: fully_shard(block)`",
        "`fsdp_auto_wrap_policy`, `fsdp_transformer_layer_cls_to_wrap`",
        "`auto_wrap_policy`, `transformer_layer_cls_to_wrap`",
        "yours, in `configure_model`",
        "one per layer",
    ),
    (
        "`reshard_after_forward=`",
        "`fsdp_reshard_after_forward`",
        "`reshard_after_forward`",
        "yours",
        "`fsdp_reshard_after_forward`",
    ),
    (
        "`MixedPrecisionPolicy(param_dtype=, reduce_dtype=)`",
        "`mixed_precision: bf16` sets both, and `output_dtype`",
        "`bf16=True`, likewise",
        "yours",
        "`mixed_precision_param`; reduces in float32",
    ),
    (
        "`offload_policy=CPUOffloadPolicy()`",
        "`fsdp_offload_params`",
        "`cpu_offload`",
        "yours",
        "`enable_cpu_offload`",
    ),
    ("`ignored_params=`", "`fsdp_ignored_modules`", "none", "yours", "none"),
    (
        "`checkpoint_wrapper(block)`",
        "`fsdp_activation_checkpointing`",
        "`activation_checkpointing`",
        "yours",
        '`activation_checkpoint.mode`, "full"',
    ),
    (
        "`set_model_state_dict(..., broadcast_from_rank0=True)`",
        "`fsdp_cpu_ram_efficient_loading`",
        "`cpu_ram_efficient_loading`",
        "yours",
        "`initial_load_path`",
    ),
    (
        "`dcp.save` of shards, or one full file",
        "`fsdp_state_dict_type`",
        "`state_dict_type`; one full file by default",
        "`save_distributed_checkpoint`; shards by default",
        "`checkpoint.*`; shards",
    ),
    (
        "`set_requires_gradient_sync(False)`",
        "`gradient_accumulation_steps`",
        "`gradient_accumulation_steps`",
        "`accumulate_grad_batches`",
        "`global_batch_size`",
    ),
    (
        "`clip_grad_norm_(..., 1.0)`",
        "`accelerator.clip_grad_norm_`",
        "`max_grad_norm`; 1.0 by default",
        "`gradient_clip_val`",
        "`max_norm`; 1.0 by default",
    ),
]


def train_with_accelerate(rank: int, world_size: int) -> dict:
    """Ask accelerate for FSDP2 on CPU ranks; report its messages, how it shards the model, and the losses."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))  # as torchrun would
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = build_model(seed=0)
    optimizer = make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)

    losses = []
    for step in range(STEPS):
        images, labels = make_up_batch(step, rank, world_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(mean_over_ranks(loss))

    plugin.set_mixed_precision("bf16")  # what `mixed_precision: bf16` does where the plugin is used
    return {
        "distributed_type": str(accelerator.distributed_type),
        "model_is_a": type(model).__name__,
        "plugin_in_use": accelerator.state.__dict__.get("fsdp_plugin") is not None,
        "parameter_bytes": sum(own.nbytes for own in model.parameters()),
        "bf16_policy": str(plugin.mixed_precision_policy),
        "losses": losses,
    }


def train_with_plain_torch(rank: int, world_size: int) -> dict:
    """Train the same model on the same noise under `fully_shard`."""
    model = shard(build_model(seed=0), init_device_mesh(rank_device().type, (world_size,)))
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        images, labels = (own.to(rank_device()) for own in make_up_batch(step, rank, world_size))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return {"model_is_a": type(model).__name__, "parameter_bytes": own_bytes(model), "losses": losses}


def make_up_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a batch of noise, the same on every machine."""
    random = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 1, 28, 28, generator=random)
    labels = torch.randint(10, (BATCH,), generator=random)
    return images.chunk(world_size)[rank], labels.chunk(world_size)[rank]


def ask_accelerate(kept: str | Path) -> dict:
    """Return the answers of two CPU ranks with accelerate, or, where it is not installed, the output saved in `kept`."""
    if importlib.util.find_spec("accelerate") is None:
        return json.loads(Path(kept).read_text()) | {
            "source": f"saved output, {kept}: accelerate is not installed here"
        }
    answer = launch(train_with_accelerate, world_size=2, device="cpu")[0]
    versions = {name: version(name) for name in ("accelerate", "torch")}
    return {"versions": versions, "world_size": 2, **answer, "source": "run here"}
