"""What the ranks of notebook 08's build exercise run: the reader's start of a model, and training with it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.sharding.strategies import unit_names
from fsdp_helpers.teaching.build_workers import (
    BLOCK_WIDTH,
    BLOCKS,
    CLASSES,
    TOKENS,
    WIDTH,
    plain_losses,
    sgd,
    train_averaging,
)
from fsdp_helpers.teaching.own_module import import_own

UNITS = ["root", *(f"blocks.{index}" for index in range(BLOCKS))]


class PretrainedTransformer(nn.Module):
    """The transformer that is started: `embed`, eight equal `blocks`, `head`, and `waves`. (B, WIDTH) -> (B, CLASSES)

    `waves` is a buffer that no state dict has; `fill_buffers` computes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, BLOCK_WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(BLOCK_WIDTH, 4, 4 * BLOCK_WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(BLOCK_WIDTH, CLASSES)
        self.register_buffer("waves", torch.empty(TOKENS, BLOCK_WIDTH), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        values = torch.arange(TOKENS * BLOCK_WIDTH, device=self.waves.device).sin()
        self.waves.copy_(values.view(TOKENS, BLOCK_WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs).unsqueeze(1) + self.waves  # (B, TOKENS, BLOCK_WIDTH)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


@dataclass(frozen=True, kw_only=True)
class StartedByReader:
    """What came of a reader's start, on one rank."""

    whole: list[str]  # parameters that are not sharded
    on_meta: list[str]
    units: list[str]
    buffer_right: bool
    extra_bytes: int  # allocated during the start at most, on top of what stays
    losses: list[float]
    right: list[float]  # those of one process with the same weights


def start_by_reader(rank: int, world_size: int, module: str) -> StartedByReader:
    """Let the reader's `start_sharded` start the model from rank 0's weights, look at the result, and train it."""
    start_sharded = import_own(module, "start_sharded")
    torch.manual_seed(0)
    plain = PretrainedTransformer()
    saved = {name: value.clone() for name, value in plain.state_dict().items()}  # outlive the trace, which began later
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
        "extra_bytes": curve.peak_bytes - curve.held_bytes,
    }
    if found["whole"] or found["on_meta"]:
        return StartedByReader(**found, buffer_right=False, losses=[], right=right)
    buffer_right = torch.equal(model.waves, plain.waves)
    losses = train_averaging(model, rank, world_size, lambda: None)  # FSDP averages by itself
    return StartedByReader(**found, buffer_right=buffer_right, losses=losses, right=right)
