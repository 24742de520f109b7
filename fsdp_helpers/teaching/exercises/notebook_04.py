"""Exercises for notebook 04: choose a threshold and a transformer's units, and write hooks that unshard and reshard."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.collectives import Collective
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import exercise
from fsdp_helpers.teaching.exercises.on_ranks import RANKS, Findings, first_of, judge_on_ranks, losses_differ
from fsdp_helpers.teaching.exercises.runs import AS_IT_IS, RunTask, judge_run
from fsdp_helpers.teaching.exercises.small_net import (
    BLOCK_WIDTH,
    CLASSES,
    STEPS,
    TOKENS,
    WIDTH,
    build_blocks,
    mean_loss,
    over_ranks,
    plain_losses,
    rank_batch,
    sgd,
)

THRESHOLD = RunTask(
    peak_bytes=1_450_000_000,
    peak_failure="memory-default-threshold",
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
# By world size: with one fewer unit, the peak is too high; with one more, there are too many collectives.
CUT_PEAK_BYTES = {2: 2_300_000, 3: 1_900_000}
CUT_COLLECTIVES = 14


@exercise("04")
def check_threshold(record: RunRecord | None) -> str:
    """Notebook 04: check that DeepNet's units on two ranks meet the limits on peak memory and collectives per step."""
    return judge_run(record, THRESHOLD)


@exercise("04")
def check_cut(module: str = "my_cut", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 04: check that `shard_model(model, mesh)` chooses units that give a low peak and few collectives."""
    return judge_on_ranks(train_readers_cut, module, ("shard_model",), ranks)


class SmallTransformer(nn.Module):
    """The transformer to shard: `embed`, eight equal `blocks`, and `head`. (B, WIDTH) -> (B, CLASSES)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, BLOCK_WIDTH)
        self.blocks = build_blocks()
        self.head = nn.Linear(BLOCK_WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs.unsqueeze(1).expand(-1, TOKENS, -1))  # (B, TOKENS, BLOCK_WIDTH)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


def train_readers_cut(rank: int, world_size: int, shard_model: Callable) -> Findings:
    """Shard the transformer with the reader's code, train it, and check its units, peak and collectives."""
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
    losses = over_ranks(losses)
    last = trace.last_step()
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    yield bool(whole), f"{len(whole)} parameters aren't in any unit, including {first_of(whole)}"
    peak, limit = last.curve.peak_bytes, CUT_PEAK_BYTES[world_size]
    because, *failures = hint_on_peak(last.collectives)
    too_high = f"the peak is {format_bytes(peak)}; the target is below {format_bytes(limit)}: {because}"
    yield peak >= limit, too_high, *failures
    num_collectives = len(last.collectives)
    too_many = f"a step runs {num_collectives} collectives; the target is at most {CUT_COLLECTIVES}"
    yield num_collectives > CUT_COLLECTIVES, too_many, "slow-many-units"
    in_root = [f"blocks.{index}" for index, block in enumerate(model.blocks) if not has_unit(block)]
    yield bool(in_root), f"{', '.join(in_root)} belong only to the root, which stays unsharded until backward ends"
    yield losses_differ(losses, right, "the losses don't match a single-process run")
    with_what = f"{num_collectives} collectives per step and a peak of {format_bytes(peak)}"
    return f"Right: on {{ranks}} ranks, with {with_what}."


def hint_on_peak(collectives: Sequence[Collective]) -> tuple:
    """Return what raises a step's peak, judged from its collectives, and the failure that shows the same, if any."""
    gathered = [event.bytes for event in collectives if event.op == "all_gather"]
    num_units = len(collectives) - len(gathered)  # each unit's gradients are reduced once
    if num_units == 1:
        return "one unit is the entire model, and is unsharded at once", "memory-root-only"
    kept = 2 * num_units - 1 - len(gathered)  # the root isn't resharded between forward and backward
    if kept > 0:
        return (f"{kept} of {num_units} units aren't resharded after forward, in addition to the root",)
    largest = format_bytes(max(gathered))
    return (f"the largest of {num_units} units has {largest} of parameters; smaller units unshard less at once",)


def has_unit(module: nn.Module) -> bool:
    """Return True if every parameter in `module` belongs to a unit that is `module` itself or is inside it."""
    if isinstance(module, FSDPModule):
        return True
    own = list(module.parameters(recurse=False))
    return not own and all(has_unit(child) for child in module.children())


# ---------------------------------------------------------------- hooks


HOOKED_BLOCKS, HOOKED_WIDTH = 4, 37  # a block has 2,812 parameters, not a multiple of 3
GATHERS = 2 * HOOKED_BLOCKS  # per step: one before each block's forward, and one before its backward


@exercise("04")
def check_hooks(module: str = "my_hooks", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 04: check that the hooks from `hook_block(...)` fill `whole` only while `block` computes."""
    return judge_on_ranks(train_readers_hooks, module, ("hook_block",), ranks)


class Block(nn.Module):
    """Two layers with a tanh between them. (B, HOOKED_WIDTH) -> (B, HOOKED_WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HOOKED_WIDTH, HOOKED_WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


class Widen(nn.Module):
    """A layer that repeats columns and has no parameters, so its output needs no gradient.

    (B, WIDTH) -> (B, HOOKED_WIDTH)
    """

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.repeat(1, -(-HOOKED_WIDTH // WIDTH))[:, :HOOKED_WIDTH]


def build_model() -> nn.Sequential:
    """Build four blocks and a plain layer with the same values on every rank. (B, WIDTH) -> (B, CLASSES)

    The first block's inputs don't need a gradient, as in a model whose first block gets the data. A hook that waits for
    the gradient of that block's inputs would run too early.
    """
    torch.manual_seed(0)
    blocks = [Block() for _ in range(HOOKED_BLOCKS)]
    return nn.Sequential(Widen(), *blocks, nn.Linear(HOOKED_WIDTH, CLASSES))


class ShardedBlock:
    """The checker's sharded block: this rank's shard, and `whole`, which the reader's hooks fill and empty."""

    def __init__(self, block: nn.Module, rank: int, world_size: int) -> None:
        self.parameters, self.rank, self.world_size = list(block.parameters()), rank, world_size
        self.whole = self._flatten([parameter.data for parameter in self.parameters])
        self.shard = self.whole.chunk(world_size)[rank].clone()
        self.num_gathers = 0
        sizes = [parameter.numel() for parameter in self.parameters]
        views = self.whole[: sum(sizes)].split(sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view.view(parameter.shape)

    @property
    def whole_bytes(self) -> int:
        """Return the current size of `whole`'s storage."""
        return self.whole.untyped_storage().nbytes()

    def gather(self, whole: Tensor) -> None:
        """Fill `whole`, (padded number of parameters,), from all ranks, for hooks; an empty storage is a ValueError."""
        if whole.data_ptr() == 0:
            raise ValueError("gather can't fill a tensor whose storage is still empty")
        dist.all_gather_into_tensor(whole, self.shard)
        self.num_gathers += 1

    def step(self, learning_rate: float) -> None:
        """Update the shard with its part of the mean gradient, and free the full gradients."""
        gradient = self._flatten([parameter.grad for parameter in self.parameters])
        dist.all_reduce(gradient)
        self.shard -= learning_rate * gradient.chunk(self.world_size)[self.rank] / self.world_size
        for parameter in self.parameters:
            parameter.grad = None

    def _flatten(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.world_size))


class Onlooker:
    """A record of the full-parameter bytes in the blocks and the largest number of blocks unsharded at once."""

    def __init__(self, blocks: list[ShardedBlock]) -> None:
        self.blocks = blocks
        self.left: dict[str, int] = {}
        self.most_whole = 0

    def look(self, moment: str) -> None:
        """Record the total full-parameter bytes in the blocks at a moment when none of them is computing."""
        self.left[moment] = max(self.left.get(moment, 0), sum(block.whole_bytes for block in self.blocks))

    def computing(self, block: ShardedBlock, when: str) -> None:
        """Count the unsharded blocks while `block` computes; raise RuntimeError if `block`'s own storage is empty."""
        if block.whole_bytes == 0:
            is_first = block is self.blocks[0] and when == "backward"
            because = "; this block's inputs need no gradient, so don't wait for one" if is_first else ""
            raise RuntimeError(f"in {when}, a layer computes while its block's storage is empty{because}")
        self.most_whole = max(self.most_whole, sum(other.whole_bytes > 0 for other in self.blocks))

    def watch(self, module: Block, block: ShardedBlock) -> None:
        """Observe the forward and backward passes of every layer in `module`."""
        for layer in (module.first, module.second):
            layer.register_forward_pre_hook(lambda *_: self.computing(block, "forward"))
            layer.register_full_backward_pre_hook(lambda *_: self.computing(block, "backward"))


def train_readers_hooks(rank: int, world_size: int, hook_block: Callable) -> Findings:
    """Train four blocks with the reader's hooks, and check how many blocks are unsharded, and when."""
    plain = build_model()
    right = plain_losses(plain, sgd(plain))
    model = build_model()
    ends = nn.ModuleList([model[0], model[-1]])  # not sharded, and the first has no parameters
    optimizer = sgd(ends)
    modules = list(model[1:-1])
    blocks = [ShardedBlock(block, rank, world_size) for block in modules]
    seen = Onlooker(blocks)
    for hooked, block in zip(modules, blocks, strict=True):
        hook_block(hooked, block.whole, block.gather)
        seen.watch(hooked, block)
    seen.look("after hook_block")
    losses = []
    for step in range(STEPS):
        for block in blocks:
            block.num_gathers = 0
        optimizer.zero_grad()
        loss = mean_loss(model, *rank_batch(step, rank, world_size))
        seen.look("between forward and backward")
        loss.backward()
        seen.look("after backward")
        for parameter in ends.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        for block in blocks:
            block.step(optimizer.param_groups[0]["lr"])
        losses.append(loss.detach())
    losses = over_ranks(losses)
    for moment, num_bytes in seen.left.items():
        yield num_bytes > 0, f"{moment}, blocks still have {num_bytes:,} bytes; whose storage wasn't emptied?"
    num_gathers = sum(block.num_gathers for block in blocks)
    one_per_block = f"a step runs {num_gathers} all-gathers, not {GATHERS}: one per block in each pass"
    yield num_gathers != GATHERS, one_per_block
    yield seen.most_whole > 2, f"while one block computes, {seen.most_whole} blocks are unsharded; 2 suffice"
    yield losses_differ(losses, right, "the losses don't match a single-process run")
    return f"Right: on {{ranks}} ranks, {GATHERS} all-gathers per step, and no full parameters left over."
