"""What the ranks of a build exercise run: the reader's code in a small training, and plain training beside it.

Every rank also trains the whole batch by itself, without any collective: the losses that data parallelism must have.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.ranks.exchange import sum_over_ranks
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.exercises.own_module import import_own

BATCH, WIDTH, CLASSES = 24, 10, 5  # a batch over all ranks divides by 2 and 3, and their parts by 4
STEPS = 4
HIDDEN = 101
NET_PARAMS = (WIDTH + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES  # 11,923: neither 2 nor 3 divides it
NET_BYTES = 4 * NET_PARAMS
NET_UNITS = 3  # as `shard_net` cuts it, the root included
BUCKET_SIZES = (41_000, 1_000_000)  # the largest gradient fits into either, all of them fit into the second
BLOCKS, BLOCK_WIDTH, TOKENS = 8, 48, 4
BUILT = "the unit is built"  # a mark in the trace


def build_net() -> nn.Sequential:
    """Three layers, the same values on every rank: (B, WIDTH) -> (B, CLASSES)."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers)


def shard_net(world_size: int) -> nn.Sequential:
    """The same, sharded: two layers are units, the third belongs to the root."""
    model, mesh = build_net(), init_device_mesh("cpu", (world_size,))
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=mesh)
    return model


class SmallTransformer(nn.Module):
    """The transformer that is cut: `embed`, eight equal `blocks`, `head`. (B, WIDTH) -> (B, CLASSES)"""

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


def load_batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of all ranks: inputs (BATCH, WIDTH), labels (BATCH,)."""
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :CLASSES].argmax(dim=-1)


def own_part(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    inputs, labels = load_batch(step)
    return inputs.chunk(world_size)[rank], labels.chunk(world_size)[rank]


def mean_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), labels)


def over_ranks(losses: list[Tensor]) -> list[float]:
    """The mean over the ranks of each loss."""
    return (sum_over_ranks(torch.stack(losses)) / dist.get_world_size()).tolist()


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable = list, num_steps: int = STEPS
) -> list[float]:
    """Training in one process; `after_step()` is called after each step."""
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = mean_loss(model, *load_batch(step))
        loss.backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, which sees whether a gradient is a mean or a sum; Adam would hide it."""
    return torch.optim.SGD(model.parameters(), lr=0.3)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with so large an `eps` that it sees it, too."""
    return torch.optim.Adam(parameters, lr=0.1, eps=0.1)


# ---------------------------------------------------------------- 02


def average_by_reader(
    rank: int, world_size: int, module: str
) -> dict[int, tuple[list[float], list[float], list[Collective]]]:
    """By bucket size: the losses with the reader's averaging, those of DDP, and the collectives of a last step."""
    average_gradients = import_own(module, "average_gradients")
    model = DistributedDataParallel(build_net())
    right = train_averaging(model, rank, world_size, lambda: None)
    answers = {}
    for bucket_bytes in BUCKET_SIZES:
        model, seen = build_net(), []

        def average(model=model, bucket_bytes=bucket_bytes, seen=seen) -> None:
            with trace_collectives() as events:
                average_gradients(model, bucket_bytes)
            seen[:] = events

        answers[bucket_bytes] = train_averaging(model, rank, world_size, average), right, seen
    return answers


def train_averaging(model: nn.Module, rank: int, world_size: int, average: Callable[[], None]) -> list[float]:
    """The losses of a few steps in which `average()` comes between backward and the optimiser's step."""
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_part(step, rank, world_size))
        loss.backward()
        average()
        optimizer.step()
        losses.append(loss.detach())
    return over_ranks(losses)


# ---------------------------------------------------------------- 03


@dataclass(frozen=True, kw_only=True)
class TrainedUnit:
    """What came of training with a reader's unit, on one rank."""

    losses: list[float]
    right: list[float]  # those of one process
    shard_values: int
    built_bytes: int  # held after `__init__`
    held_bytes: int  # held between steps
    counts: dict[str, int]  # collectives of a step, by kind


def train_readers_unit(rank: int, world_size: int, module: str) -> TrainedUnit:
    """Train with the reader's unit, as notebook 03 does by hand, and look at what is held and sent."""
    unit_class = import_own(module, "Unit")
    model = build_net()
    right = plain_losses(model, adam(list(model.parameters())))
    del model
    losses = []
    with trace_memory("cpu") as trace:
        model = build_net()
        unit = unit_class(model, rank, world_size)
        if not isinstance(getattr(unit, "shard", None), nn.Parameter):
            raise TypeError("a Unit needs `shard`, an nn.Parameter that holds this rank's slice")
        with record_function(BUILT):
            pass
        optimizer = adam([unit.shard])
        for step in range(STEPS):
            optimizer.zero_grad()
            unit.gather()
            loss = mean_loss(model, *own_part(step, rank, world_size))
            loss.backward()
            unit.reduce_gradients()
            unit.free()
            optimizer.step()
            losses.append(loss.detach())
    last = trace.last_step()
    counts = {counted.op: counted.count for counted in count_collectives(last.collectives)}
    return TrainedUnit(
        losses=over_ranks(losses),
        right=right,
        shard_values=unit.shard.numel(),
        built_bytes=trace.between_marks(BUILT)[0][0],
        held_bytes=last.curve.held_bytes,
        counts=counts,
    )


# ---------------------------------------------------------------- 04


@dataclass(frozen=True, kw_only=True)
class TrainedCut:
    """What came of training a model that a reader has cut, on one rank."""

    losses: list[float]
    right: list[float]  # those of one process
    whole: list[str]  # parameters that are not sharded
    in_root: list[str]  # blocks with parameters that no unit but the root has
    peak_bytes: int
    num_collectives: int


def train_readers_cut(rank: int, world_size: int, module: str) -> TrainedCut:
    """Let the reader cut the transformer, train it, and look at its units and at what a step needs."""
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
            loss = mean_loss(model, *own_part(step, rank, world_size))
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
    """True if each parameter in `module` belongs to a unit that is `module` or lies within it."""
    if isinstance(module, FSDPModule):
        return True
    own = list(module.parameters(recurse=False))
    return not own and all(has_unit(child) for child in module.children())
