"""Code that bypasses the hooks of a wrapper or a unit, runs them twice, or does something they don't expect."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, gradient_norm, images, in_units, small_model

# ---------------------------------------------------------------- DDP's wrapper is left out


def train_the_module(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(small_model())
    model.module(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def train_the_wrapper(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(small_model())
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def norm_alone() -> Numbers:
    model = small_model()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- DDP's hooks run twice


class Recomputed(nn.Module):
    """A model whose last layers are recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = small_model(), use_reentrant

    def forward(self, samples: Tensor) -> Tensor:
        hidden = self.layers[:2](samples)
        return checkpoint(self.layers[2:], hidden, use_reentrant=self.use_reentrant)


def recompute_reentrantly(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(Recomputed(use_reentrant=True), find_unused_parameters=True)
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def recompute_without_reentry(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(Recomputed(use_reentrant=False), find_unused_parameters=True)
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- an operation that DTensor doesn't know


def count_values_of_shards(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    return {"different values": float(model[0].weight.detach().unique().numel())}


def count_values_of_the_full_tensor(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    return {"different values": float(model[0].weight.full_tensor().detach().unique().numel())}


def values_alone() -> Numbers:
    return {"different values": float(small_model()[0].weight.detach().unique().numel())}


# ---------------------------------------------------------------- inputs in one format, weights in another


def feed_fp32_into_bf16(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model().to(torch.bfloat16))
    return {"outputs": float(model(images()).numel())}


def let_the_policy_cast(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return {"outputs": float(model(images()).numel())}


def two_per_image() -> Numbers:
    return {"outputs": 2.0 * len(images())}


# ---------------------------------------------------------------- an evaluation that keeps its graphs


def add_up_losses(rank: int, world_size: int) -> Numbers:
    model, batches = small_model(), images().split(2)
    with trace_memory() as trace:
        total = torch.zeros(())
        for batch in batches:
            total = total + model(batch).square().mean()
    return {"bytes kept": trace.whole().curve.held_bytes}


def add_up_losses_without_graphs(rank: int, world_size: int) -> Numbers:
    model, batches = small_model(), images().split(2)
    with trace_memory() as trace, torch.no_grad():
        total = torch.zeros(())
        for batch in batches:
            total = total + model(batch).square().mean()
    return {"bytes kept": trace.whole().curve.held_bytes}


def one_number() -> Numbers:
    return {"bytes kept": 4}


OUTSIDE = (
    Failure(
        name="wrong-unwrapped-module",
        broken=train_the_module,
        fixed=train_the_wrapper,
        right=norm_alone,
    ),
    Failure(
        name="crash-ready-twice",
        broken=recompute_reentrantly,
        fixed=recompute_without_reentry,
        right=norm_alone,
        says="Expected to mark a variable ready only once",
    ),
    Failure(
        name="crash-no-sharding-strategy",
        broken=count_values_of_shards,
        fixed=count_values_of_the_full_tensor,
        right=values_alone,
        says="Sharding propagation failed",
    ),
    Failure(
        name="crash-dtype-mismatch",
        broken=feed_fp32_into_bf16,
        fixed=let_the_policy_cast,
        right=two_per_image,
        says="must have the same dtype",
    ),
    Failure(
        name="memory-graph-kept",
        broken=add_up_losses,
        fixed=add_up_losses_without_graphs,
        right=one_number,
    ),
)
