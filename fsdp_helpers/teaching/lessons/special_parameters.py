"""Rank functions for notebook 14 about special parameters (tied, frozen, ignored, used on some ranks) and buffers."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.measuring.memory import state_bytes
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import Block, ViT
from fsdp_helpers.ranks.group import gather_over_ranks, rank_device
from fsdp_helpers.records import CollectiveCount, StateBytes

STEPS = 4


def each(rank: int, world_size: int, function: Callable, choices: Sequence[Hashable]) -> dict:
    """Call a rank function with each of `choices` in turn on the same ranks; return the results, keyed by choice."""
    return {choice: function(rank, world_size, choice) for choice in choices}


# ---------------------------------------------------------------- tied


class TinyLanguageModel(nn.Module):
    """A next-token predictor whose embedding and head share a matrix. (N, tokens) -> (N, tokens, 20)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same on every rank
        self.embed = nn.Embedding(20, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight  # tied: one parameter with two names

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


def cut_tied(model: TinyLanguageModel, cut: str, mesh: DeviceMesh) -> nn.Module:
    """Shard `model`. `cut` is the unit besides the root: "nothing", "the head", "both ends", or "FSDP1, the head"."""
    if cut == "FSDP1, the head":
        policy = CustomPolicy(lambda module: module is model.head)
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=rank_device(), use_orig_params=True)
    if cut == "the head":
        fully_shard(model.head, mesh=mesh)
    if cut == "both ends":
        fully_shard([model.embed, model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_tied(rank: int, world_size: int, cut: str) -> tuple[list[float], int, float]:
    """Return losses, how many parameters the optimizer has, and how much the embedding and the head differ afterward.

    `cut` is an argument for `cut_tied`, or "not sharded".
    """
    model = TinyLanguageModel().to(rank_device())
    if cut != "not sharded":
        model = cut_tied(model, cut, init_device_mesh(rank_device().type, (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(STEPS):
        tokens = torch.arange(20, device=rank_device()).expand(4, -1)  # the same on every rank
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ends = [whole(end.weight) for end in (model.embed, model.head)]
    return losses, len(optimizer.param_groups[0]["params"]), (ends[0] - ends[1]).abs().max().item()


def whole(parameter: Tensor) -> Tensor:
    """Return the full values of a parameter on every rank."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


# ---------------------------------------------------------------- frozen


class LowRank(nn.Module):
    """A frozen linear layer plus a small trained adapter, as in LoRA (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at first the adapter adds nothing

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))


def add_adapters(model: ViT, rank: int) -> ViT:
    """Freeze everything, then give each block's attention a trainable adapter of rank `rank`."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LowRank(block.attention.qkv, rank)
    return model


def train_frozen(rank: int, world_size: int, adapter: int, api: str) -> tuple[StateBytes, tuple[CollectiveCount, ...]]:
    """Return this rank's bytes and a step's collectives, training all parameters (`adapter` is 0) or only adapters."""
    torch.manual_seed(0)
    shape = VIT_SHAPES["vit-mnist"]
    model = ViT(shape)
    model = (add_adapters(model, adapter) if adapter else model).to(rank_device())
    if api == "fsdp1":
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad")  # notebook 14 says so
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=rank_device(), use_orig_params=True
        )
    else:
        mesh = init_device_mesh(rank_device().type, (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained)
    images = torch.randn(4, shape.channels, shape.image_size, shape.image_size, device=rank_device())
    for _ in range(2):
        optimizer.zero_grad()
        with trace_collectives() as seen:
            model(images).square().mean().backward()
        optimizer.step()
    return state_bytes(model, optimizer), count_collectives(seen)


# ---------------------------------------------------------------- ignored


def train_ignoring(rank: int, world_size: int, averaged: bool) -> tuple[str, float]:
    """Return the type of an ignored parameter, and how much the ranks' copies differ after a few steps.

    If `averaged` is True, the parameter's gradient is averaged by hand.
    """
    torch.manual_seed(0)
    shape = VIT_SHAPES["vit-mnist"]
    model = ViT(shape).to(rank_device())
    mesh = init_device_mesh(rank_device().type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.positions})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # shards and a full tensor, one by one
    torch.manual_seed(rank)  # every rank sees its own images
    for _ in range(STEPS):
        optimizer.zero_grad()
        images = torch.randn(4, shape.channels, shape.image_size, shape.image_size, device=rank_device())
        model(images).square().mean().backward()
        if averaged:
            dist.all_reduce(model.positions.grad)
            model.positions.grad /= world_size
        optimizer.step()
    return type(model.positions).__name__, largest_gap(model.positions.detach())


def largest_gap(values: Tensor) -> float:
    """Return the largest difference between any two ranks' values."""
    everywhere = torch.stack(gather_over_ranks(values.cpu()))
    return (everywhere.max(dim=0).values - everywhere.min(dim=0).values).max().item()


# ---------------------------------------------------------------- ranks that use different layers

WAYS = ("DDP", "FSDP2 as it is", "unused as zeros", "each layer a unit", "each layer a unit, all called")


def train_two_layers(rank: int, world_size: int, way: str) -> tuple[float, list[float | None]]:
    """Return this rank's loss and, for each of two layers, this rank's gradient, or None if it has none.

    Rank 0 uses only the first layer and rank 1 only the second, so the mean gradients over two ranks are 1 and 10.
    `way` is one of WAYS.
    """
    layers = nn.ModuleList(nn.Linear(1, world_size, bias=False) for _ in range(2)).to(rank_device())
    for number, layer in enumerate(layers, 1):
        nn.init.constant_(layer.weight, number)
    model = TwoLayers(layers, calls_all=way.endswith("all called"))
    if way == "DDP":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        mesh = init_device_mesh(rank_device().type, (world_size,))
        for layer in layers if way.startswith("each") else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if way == "unused as zeros":
            model.set_reduce_scatter_unused_params(True)
    kinds = torch.full((1,), rank % 2, device=rank_device())
    loss = model(2 * 10.0**kinds, kinds)
    loss.backward()
    gradients = [layer.weight.grad for layer in layers]
    own = [value.to_local() if isinstance(value, DTensor) else value for value in gradients]
    return loss.item(), [None if value is None else value.flatten()[0].item() for value in own]


class TwoLayers(nn.Module):
    """One layer for samples of kind 0, another for kind 1. (N,) inputs and kinds -> the sum of the outputs.

    With `calls_all`, every rank calls both layers, even one without samples, whose gradient is then zero.
    """

    def __init__(self, layers: nn.ModuleList, calls_all: bool) -> None:
        super().__init__()
        self.layers, self.calls_all = layers, calls_all

    def forward(self, inputs: Tensor, kinds: Tensor) -> Tensor:
        total = torch.zeros((), device=inputs.device)
        for kind, layer in enumerate(self.layers):
            mine = inputs[kinds == kind, None]  # (its samples, 1)
            if len(mine) or self.calls_all:
                total = total + layer(mine).sum()
        return total


# ---------------------------------------------------------------- buffers


@dataclass(frozen=True, kw_only=True)
class BufferRecord:
    """The running statistics of a batch norm layer after a few steps with a strategy."""

    num_values: int  # on this rank
    apart: float  # the largest difference between two ranks' means
    variances_apart: float  # the same for the running variances
    saved: bool  # whether a state dict contains the running mean


def train_with_buffers(rank: int, world_size: int, strategy: str) -> BufferRecord:
    """Train with batch norm, whose running mean and variance are buffers.

    `strategy` is "ddp", "fsdp1", "fsdp2", or "fsdp2, averaged", which averages the buffers at the end.
    """
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1)).to(rank_device())
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=rank_device(), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh(rank_device().type, (world_size,)))
    torch.manual_seed(rank)  # every rank sees its own inputs
    for _ in range(STEPS):
        model(torch.randn(16, 4, device=rank_device())).square().mean().backward()
    if strategy.endswith("averaged"):
        average_buffers(model)
    return BufferRecord(
        num_values=norm.running_mean.numel(),
        apart=largest_gap(norm.running_mean),
        variances_apart=largest_gap(norm.running_var),
        saved=any(name.endswith("running_mean") for name in model.state_dict()),
    )


def average_buffers(model: nn.Module) -> None:
    """Average the ranks' statistics, including variances. Call this before evaluating and before saving."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
