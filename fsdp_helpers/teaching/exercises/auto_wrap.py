"""Exercises of notebook 04: a threshold, the units of a transformer, and blocks whose parameters come and go."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import exercise, expect
from fsdp_helpers.teaching.exercises.on_ranks import RANKS, expect_same_losses, first_of, in_words, run_on_ranks
from fsdp_helpers.teaching.exercises.own_module import import_own, read_module
from fsdp_helpers.teaching.exercises.runs import AS_IT_IS, RunTask, judge_run
from fsdp_helpers.teaching.exercises.training import (
    BLOCK_WIDTH,
    BLOCKS,
    CLASSES,
    STEPS,
    TOKENS,
    WIDTH,
    mean_loss,
    over_ranks,
    plain_losses,
    rank_batch,
    sgd,
)
from fsdp_helpers.teaching.exercises.unit_hooks import GATHERS, TrainedHooks, train_readers_hooks

THRESHOLD = RunTask(
    peak_bytes=1_450_000_000,
    peak_card="memory-default-threshold",
    num_collectives=9,
    world_size=2,
    strategies=("fsdp-auto-wrap",),
    fixed={
        "model": "deep",
        "global_batch_size": 32,
        "api": "fsdp2",
        "sharding": "full",
        "reshard_after_forward": True,
        **AS_IT_IS,
    },
)
CUT_PEAK_BYTES = {2: 2_300_000, 3: 1_900_000}  # one unit less needs more, one more is one too many
CUT_COLLECTIVES = 14


@exercise("04")
def check_threshold(record: RunRecord | None) -> str:
    """Notebook 04: choose DeepNet's units on two ranks, below a peak, with a limit on the collectives per step."""
    return judge_run(record, THRESHOLD)


@exercise("04")
def check_cut(module: str = "my_cut", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 04: `shard_model(model, mesh)` chooses the units of the checker's transformer, below a peak, with few collectives."""
    read_module(module, "shard_model")
    for world_size in ranks:
        for rank, found in enumerate(run_on_ranks(train_readers_cut, module, world_size)):
            _expect_cut(found, CUT_PEAK_BYTES[world_size], f"on {world_size} ranks, rank {rank}: ")
    return (
        f"Right: on {in_words(ranks)} ranks, with {found.num_collectives} collectives and "
        f"{format_bytes(found.peak_bytes)} at the peak."
    )


@dataclass(frozen=True, kw_only=True)
class TrainedCut:
    """The result of training a model whose units a reader chose, on one rank."""

    losses: list[float]
    right: list[float]  # those of one process
    whole: list[str]  # parameters that are not sharded
    in_root: list[str]  # blocks with parameters that no unit but the root has
    peak_bytes: int
    num_collectives: int


def _expect_cut(found: TrainedCut, limit_bytes: int, says: str) -> None:
    expect(
        not found.whole, f"{says}{len(found.whole)} parameters aren't in any unit, {first_of(found.whole)} among them"
    )
    expect(
        found.peak_bytes < limit_bytes,
        f"{says}the peak is {format_bytes(found.peak_bytes)}, the target is below {format_bytes(limit_bytes)}",
        "memory-root-only",
    )
    expect(
        found.num_collectives <= CUT_COLLECTIVES,
        f"{says}{found.num_collectives} collectives per step; the target is at most {CUT_COLLECTIVES}",
        "slow-many-units",
    )
    expect(
        not found.in_root,
        f"{says}{', '.join(found.in_root)} belong only to the root, which stays unsharded from forward to backward",
        "memory-root-only",
    )
    expect_same_losses(found.losses, found.right, f"{says}the losses aren't those of one process")


@exercise("04")
def check_hooks(module: str = "my_hooks", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 04: `hook_block(block, whole, gather)`, so that `whole` has bytes only while its block computes."""
    read_module(module, "hook_block")
    for world_size in ranks:
        for rank, found in enumerate(run_on_ranks(train_readers_hooks, module, world_size)):
            _expect_hooks(found, f"on {world_size} ranks, rank {rank}: ")
    return f"Right: on {in_words(ranks)} ranks, {GATHERS} gathers in a step, and no bytes in between."


def _expect_hooks(found: TrainedHooks, says: str) -> None:
    for moment, num_bytes in found.left.items():
        expect(num_bytes == 0, f"{says}{moment}, blocks still have {num_bytes:,} bytes; whose storage is not emptied?")
    expect(
        found.num_gathers == GATHERS,
        f"{says}{found.num_gathers} gathers in a step, not {GATHERS}: each block needs one in forward, one in backward",
    )
    expect(found.most_whole <= 2, f"{says}{found.most_whole} blocks are unsharded at once while one computes")
    expect_same_losses(found.losses, found.right, f"{says}the losses are not those of one process")


class SmallTransformer(nn.Module):
    """The transformer to shard: `embed`, eight equal `blocks`, `head`. (B, WIDTH) -> (B, CLASSES)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, BLOCK_WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(BLOCK_WIDTH, 4, 4 * BLOCK_WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(BLOCK_WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs.unsqueeze(1).expand(-1, TOKENS, -1))  # (B, TOKENS, BLOCK_WIDTH)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


def train_readers_cut(rank: int, world_size: int, module: str) -> TrainedCut:
    """Let the reader shard the transformer, train it, and examine its units and what a step needs."""
    shard_model = import_own(module, "shard_model")
    model = SmallTransformer()
    right = plain_losses(model, sgd(model))
    del model
    losses = []
    with trace_memory("cpu") as trace:
        model = SmallTransformer()
        shard_model(model, init_device_mesh("cpu", (world_size,)))
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = mean_loss(model, *rank_batch(step, rank, world_size))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    last = trace.last_step()
    return TrainedCut(
        losses=over_ranks(losses),
        right=right,
        whole=[name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)],
        in_root=[f"blocks.{index}" for index, block in enumerate(model.blocks) if not has_unit(block)],
        peak_bytes=last.curve.peak_bytes,
        num_collectives=len(last.collectives),
    )


def has_unit(module: nn.Module) -> bool:
    """Return True if each parameter in `module` belongs to a unit that is `module` or lies within it."""
    if isinstance(module, FSDPModule):
        return True
    own = list(module.parameters(recurse=False))
    return not own and all(has_unit(child) for child in module.children())
