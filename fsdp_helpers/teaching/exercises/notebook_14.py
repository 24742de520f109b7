"""The exercise for notebook 14: move a DDP training run to FSDP2 midway."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.ranks.group import sum_over_ranks
from fsdp_helpers.sharding.strategies import unit_names
from fsdp_helpers.teaching.exercises.answers import exercise
from fsdp_helpers.teaching.exercises.on_ranks import (
    RANKS,
    TOLERANCE,
    Findings,
    first_of,
    judge_on_ranks,
    losses_differ,
    units_differ,
)
from fsdp_helpers.teaching.exercises.small_net import CLASSES, WIDTH, load_batch

MOVED_AT, LAST_STEP = 6, 12  # steps
PARTS, HIDDEN, BLOCKS = 2, 25, 3  # HIDDEN isn't a multiple of 2 or 3
LEARNING_RATE, MAX_NORM = 3e-3, 0.5  # the gradient's norm is above that, so clipping matters
UNITS = ["root", *(f"blocks.{index}" for index in range(BLOCKS))]
Parts = list[tuple[Tensor, Tensor]]


@exercise("14")
def check_move(module: str = "my_move", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 14: check `go_on(build, mesh, parts_of, loss_of, held_out, saved, last_step, path)` on a DDP run."""
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
        return judge_on_ranks(move_by_reader, module, ("go_on",), ranks, folder)


class ResidualBlock(nn.Module):
    """A residual block: its input (B, HIDDEN) plus the tanh of a linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class MovedModel(nn.Module):
    """The model to move: `embed`, equal `blocks`, and `head`. (B, WIDTH) -> (B, CLASSES)"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, HIDDEN)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def move_by_reader(rank: int, world_size: int, go_on: Callable, folder: str) -> Findings:
    """Train the baseline under DDP, save a checkpoint midway, and continue from it with the reader's `go_on`."""
    torch.manual_seed(0)
    checkpoint, written = (Path(folder, f"{name}-{world_size}.pt") for name in ("ddp", "moved"))
    losses, held_out_losses, unsharded = [], [], []

    def parts_of(step: int) -> Parts:
        columns = [whole.chunk(world_size)[rank].chunk(PARTS) for whole in load_batch(step)]
        return list(zip(*columns, strict=True))

    def loss_of(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(part[0]), part[1])
        if not torch.is_grad_enabled():
            held_out_losses.append(loss.item())
            return loss
        losses.append(loss.item() / PARTS)
        unsharded.append(not isinstance(model, FSDPModule))
        return loss / PARTS

    stayed = train_under_ddp(parts_of, loss_of, checkpoint)
    right, right_held_out = step_losses(losses)[MOVED_AT:], held_out_losses[MOVED_AT:]
    losses.clear()
    unsharded.clear()
    held_out_losses.clear()
    torch.manual_seed(rank + 1)  # a model that is built now has different values on each rank
    mesh = init_device_mesh("cpu", (world_size,))
    saved = torch.load(checkpoint, weights_only=True)
    with trace_collectives() as seen:
        model = go_on(MovedModel, mesh, parts_of, loss_of, load_batch(-1), saved, LAST_STEP, str(written))
    if not isinstance(model, nn.Module):
        raise TypeError(f"go_on returns an object of type {type(model).__name__}; it should return the model")
    dist.barrier()  # after this, the file is complete
    losses = step_losses(losses)

    whole = [name for name, own in model.named_parameters() if not isinstance(own, DTensor)]
    unsharded_ones = f"{len(whole)} parameters aren't sharded, including {first_of(whole)}"
    yield bool(whole), f"{unsharded_ones}; under FSDP2, a rank keeps only its shards"
    yield units_differ(unit_names(model) if isinstance(model, FSDPModule) else [], UNITS)
    too_late = f"{sum(unsharded)} micro-batches ran through a model that wasn't sharded yet"
    yield sum(unsharded) > 0, f"{too_late}; shard it before the first step"
    expected = LAST_STEP - MOVED_AT
    steps = f"{len(losses)} steps were taken instead of {expected}, from step {MOVED_AT + 1} to step {LAST_STEP}"
    yield len(losses) != expected, steps
    other_weights = "the first loss doesn't match the file's weights"
    yield losses_differ(losses[:1], right[:1], other_weights, "save-not-set")
    num_reductions = sum(event.op == "reduce_scatter" for event in seen)
    enough = f"one per step for each of the {len(UNITS)} units is right, even with {PARTS} micro-batches"
    too_many = f"{expected} steps ran {num_reductions} reductions; {enough}. What replaces no_sync?"
    yield num_reductions != expected * len(UNITS), too_many
    diverge = "the losses diverge from the baseline's, so a step lacks something that it depends on"
    yield losses_differ(losses, right, diverge, "save-plain-optimizer-state", "wrong-clip-local-norm")
    missing = (
        f"the held-out data was evaluated {len(held_out_losses)} times; every rank has to evaluate it after each of the "
        f"{expected} steps"
    )
    yield len(held_out_losses) != expected, missing, "hang-uneven-batches"
    in_part = "the held-out loss isn't the loss on all of the held-out data"
    yield losses_differ(held_out_losses, right_held_out, in_part, "wrong-sampler-padding")
    problem = problem_in_file(written, stayed)
    yield bool(problem), problem
    return f"Right: moved after step {MOVED_AT} on {{ranks}} ranks, with the baseline's losses."


def train_under_ddp(
    parts_of: Callable[[int], Parts], loss_of: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor], checkpoint: Path
) -> MovedModel:
    """Train to LAST_STEP, and write `checkpoint` after MOVED_AT steps."""
    model = DistributedDataParallel(MovedModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(LAST_STEP):
        if step == MOVED_AT:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if dist.get_rank() == 0:
                torch.save(state, checkpoint)
            dist.barrier()
        optimizer.zero_grad()
        sum(loss_of(model, part) for part in parts_of(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            loss_of(model.module, load_batch(-1))
    return model.module


def step_losses(losses: list[float]) -> list[float]:
    """Return the mean loss across ranks for each step; `losses` has one entry per part on this rank."""
    if len(losses) % PARTS:
        raise ValueError(f"loss_of was called {len(losses)} times, not {PARTS} times in each step")
    own = torch.tensor(losses).unflatten(0, (-1, PARTS)).sum(dim=1)
    return (sum_over_ranks(own) / dist.get_world_size()).tolist()


def problem_in_file(path: Path, right: MovedModel) -> str:
    """Return why one process can't use the file as the baseline's weights, or "" if it can."""
    if not path.exists():
        return "no file was written to `path`"
    weights = torch.load(path, weights_only=True)
    wanted = right.state_dict()
    if not isinstance(weights, dict) or weights.keys() != wanted.keys():
        return f"the file doesn't contain the model's {len(wanted)} tensors under their plain names"
    for name, value in weights.items():
        if isinstance(value, DTensor) or value.shape != wanted[name].shape:
            return f"{name} in the file is a shard; one process can't load it"
        if (value - wanted[name]).abs().max() > TOLERANCE:
            return f"{name} in the file doesn't match the baseline's final values"
    return ""
