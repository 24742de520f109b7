"""Rank functions of notebook 04's last build: blocks whose flat tensors a reader's hooks fill and empty."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.teaching.exercises.own_module import import_own
from fsdp_helpers.teaching.exercises.training import (
    CLASSES,
    STEPS,
    WIDTH,
    mean_loss,
    over_ranks,
    plain_losses,
    rank_batch,
    sgd,
)

HOOKED_BLOCKS, HOOKED_WIDTH = 4, 37  # a block has 2,812 parameters, which 3 does not divide
GATHERS = 2 * HOOKED_BLOCKS  # in a step: before each block's forward, and before its backward


@dataclass(frozen=True, kw_only=True)
class TrainedHooks:
    """The result of training with a reader's hooks, on one rank."""

    losses: list[float]
    right: list[float]  # those of one process
    num_gathers: int  # in the last step
    left: dict[str, int]  # bytes that blocks have when none of them computes, by moment
    most_whole: int  # blocks that are unsharded while one of them computes


class Block(nn.Module):
    """Two layers with a tanh between them. (B, HOOKED_WIDTH) -> (B, HOOKED_WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HOOKED_WIDTH, HOOKED_WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


class Widen(nn.Module):
    """Repeat the columns, without a parameter: the output needs no gradient. (B, WIDTH) -> (B, HOOKED_WIDTH)"""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.repeat(1, -(-HOOKED_WIDTH // WIDTH))[:, :HOOKED_WIDTH]


def build_model() -> nn.Sequential:
    """Build four blocks and a plain layer, the same on every rank. (B, WIDTH) -> (B, CLASSES)

    A block comes first, as in a model whose inputs are data: there, a hook that waits for the gradient of the block's
    inputs would run too early.
    """
    torch.manual_seed(0)
    blocks = [Block() for _ in range(HOOKED_BLOCKS)]
    return nn.Sequential(Widen(), *blocks, nn.Linear(HOOKED_WIDTH, CLASSES))


class SharddBlock:
    """A block as the checker keeps it: this rank's shard, and `whole`, which the reader's hooks fill and empty."""

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
        """Return the bytes that `whole` has at this moment."""
        return self.whole.untyped_storage().nbytes()

    def gather(self, whole: Tensor) -> None:
        """Fill `whole` from all ranks; the reader's hooks call this."""
        if whole.data_ptr() == 0:
            raise ValueError("gather fills a tensor whose storage is still empty")
        dist.all_gather_into_tensor(whole, self.shard)
        self.num_gathers += 1

    def step(self, learning_rate: float) -> None:
        """Update the shard with its part of the mean gradient; the full gradients are freed."""
        gradient = self._flatten([parameter.grad for parameter in self.parameters])
        dist.all_reduce(gradient)
        self.shard -= learning_rate * gradient.chunk(self.world_size)[self.rank] / self.world_size
        for parameter in self.parameters:
            parameter.grad = None

    def _flatten(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.world_size))


class Onlooker:
    """An observer that counts the bytes of unsharded parameters in the blocks, and the blocks unsharded at once."""

    def __init__(self, blocks: list[SharddBlock]) -> None:
        self.blocks = blocks
        self.left: dict[str, int] = {}
        self.most_whole = 0

    def look(self, moment: str) -> None:
        """Record the bytes of all blocks while none of them computes."""
        self.left[moment] = max(self.left.get(moment, 0), sum(block.whole_bytes for block in self.blocks))

    def computing(self, block: SharddBlock, when: str) -> None:
        """Record how many blocks are unsharded while this one computes; without its bytes, the process would crash."""
        if block.whole_bytes == 0:
            first = " first" if block is self.blocks[0] and when == "backward" else ""
            because = f"{first} block is empty{', before its last gradient: its inputs need none' if first else ''}"
            raise RuntimeError(f"in {when}, a layer computes while the storage of its{because}")
        self.most_whole = max(self.most_whole, sum(other.whole_bytes > 0 for other in self.blocks))

    def watch(self, module: Block, block: SharddBlock) -> None:
        """Observe every call of a layer of `module`."""
        for layer in (module.first, module.second):
            layer.register_forward_pre_hook(lambda *_: self.computing(block, "forward"))
            layer.register_full_backward_pre_hook(lambda *_: self.computing(block, "backward"))


def train_readers_hooks(rank: int, world_size: int, module: str) -> TrainedHooks:
    """Train four blocks with the reader's hooks, and note when each of them has bytes."""
    hook_block: Callable = import_own(module, "hook_block")
    plain = build_model()
    right = plain_losses(plain, sgd(plain))
    model = build_model()
    ends = nn.ModuleList([model[0], model[-1]])  # not sharded, and the first has no parameters
    optimizer = sgd(ends)
    modules = list(model[1:-1])
    blocks = [SharddBlock(block, rank, world_size) for block in modules]
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
    return TrainedHooks(
        losses=over_ranks(losses),
        right=right,
        num_gathers=sum(block.num_gathers for block in blocks),
        left=seen.left,
        most_whole=seen.most_whole,
    )
