"""For notebook 14: set up FSDP2 on CPU ranks with accelerate, and train the same model with plain torch."""

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
from fsdp_helpers.teaching.lessons.moved_job import build_model, local_bytes, make_optimizer, mean_over_ranks, shard

STEPS = 5
BATCH = 24  # images per step, across all ranks


def train_with_accelerate(rank: int, world_size: int) -> dict:
    """Ask accelerate for FSDP2 on CPU ranks; return what it sets up, how it shards the model, and the losses."""
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

    plugin.set_mixed_precision("bf16")  # what `mixed_precision: bf16` does when the plugin is in use
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
    return {"model_is_a": type(model).__name__, "parameter_bytes": local_bytes(model), "losses": losses}


def make_up_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a noise batch that is the same on every machine."""
    random = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 1, 28, 28, generator=random)
    labels = torch.randint(10, (BATCH,), generator=random)
    return images.chunk(world_size)[rank], labels.chunk(world_size)[rank]


def ask_accelerate(kept: str | Path) -> dict:
    """Return results from accelerate on two CPU ranks, or the output saved in `kept` if accelerate isn't installed."""
    if importlib.util.find_spec("accelerate") is None:
        return json.loads(Path(kept).read_text()) | {"source": f"saved output, {kept}: accelerate isn't installed here"}
    answer = launch(train_with_accelerate, world_size=2, device="cpu")[0]
    versions = {name: version(name) for name in ("accelerate", "torch")}
    return {"versions": versions, "world_size": 2, **answer, "source": "run here"}
