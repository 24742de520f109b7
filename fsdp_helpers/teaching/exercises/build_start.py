"""What the ranks of notebook 08's build exercise run: the reader's start of a model, and training with it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.sharding.strategies import unit_names
from fsdp_helpers.teaching.exercises.build_workers import (
    BLOCK_WIDTH,
    BLOCKS,
    TOKENS,
    plain_losses,
    sgd,
    train_averaging,
)
from fsdp_helpers.teaching.exercises.own_module import import_own

UNITS = ["root", *(f"blocks.{index}" for index in range(BLOCKS))]
VOCABULARY = 16
TIED = "head.weight"  # no file has it: it is embed.weight
LACKING = "blocks.3.linear1.weight"  # a file without it is damaged


class PretrainedTransformer(nn.Module):
    """The transformer that is started: `embed`, eight equal `blocks`, a tied `head`, and `waves`.

    Makes words of numbers, and predicts one: (B, WIDTH) -> (B, VOCABULARY). `waves` is a buffer that no state dict
    has; `fill_buffers` computes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, BLOCK_WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(BLOCK_WIDTH, 4, 4 * BLOCK_WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(BLOCK_WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("waves", torch.empty(TOKENS, BLOCK_WIDTH), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        values = torch.arange(TOKENS * BLOCK_WIDTH, device=self.waves.device).sin()
        self.waves.copy_(values.view(TOKENS, BLOCK_WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs[:, :TOKENS].abs().mul(8).long().remainder(VOCABULARY)  # (B, TOKENS)
        hidden = self.embed(words) + self.waves  # (B, TOKENS, BLOCK_WIDTH)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


@dataclass(frozen=True, kw_only=True)
class StartedByReader:
    """What came of a reader's start, on one rank."""

    whole: list[str]  # parameters that are not sharded
    on_meta: list[str]
    units: list[str]
    is_tied: bool
    buffer_right: bool
    extra_bytes: int  # allocated during the start at most, on top of what stays
    losses: list[float]
    right: list[float]  # those of one process with the same weights


def start_by_reader(rank: int, world_size: int, module: str) -> StartedByReader:
    """Let the reader's `start_sharded` start the model from rank 0's weights, look at the result, and train it."""
    start_sharded = import_own(module, "start_sharded")
    torch.manual_seed(0)
    plain = PretrainedTransformer()
    saved = file_of(plain)  # outlives the trace, which began later
    right = plain_losses(plain, sgd(plain))
    torch.manual_seed(rank + 1)  # who draws values anew draws others
    weights = dict(saved) if rank == 0 else {}
    with trace_memory("cpu") as trace:
        model = start_sharded(PretrainedTransformer, weights, init_device_mesh("cpu", (world_size,)))
    if not isinstance(model, nn.Module):
        raise TypeError(f"start_sharded returns a {type(model).__name__}; the model is asked for")
    curve = trace.whole().curve
    parameters = dict(model.named_parameters())
    found = {
        "whole": [name for name, own in parameters.items() if not isinstance(own, DTensor)],
        "on_meta": [name for name, own in [*parameters.items(), *model.named_buffers()] if own.is_meta],
        "units": unit_names(model),
        "is_tied": model.head.weight is model.embed.weight,
        "extra_bytes": curve.peak_bytes - curve.held_bytes,
    }
    if found["whole"] or found["on_meta"]:
        return StartedByReader(**found, buffer_right=False, losses=[], right=right)
    buffer_right = torch.equal(model.waves, plain.waves)
    losses = train_averaging(model, rank, world_size, lambda: None)  # FSDP averages by itself
    return StartedByReader(**found, buffer_right=buffer_right, losses=losses, right=right)


def file_of(model: PretrainedTransformer) -> dict[str, Tensor]:
    """What a file of the model has: of two names for one tensor only the first, as in safetensors."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != TIED}


def start_from_short_file(rank: int, world_size: int, module: str) -> None:
    """Let the reader's `start_sharded` start from weights that lack a tensor of a block; it should fail."""
    start_sharded = import_own(module, "start_sharded")
    weights = file_of(PretrainedTransformer())
    del weights[LACKING]
    start_sharded(PretrainedTransformer, weights if rank == 0 else {}, init_device_mesh("cpu", (world_size,)))
