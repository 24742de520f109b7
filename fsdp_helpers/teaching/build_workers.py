"""What the ranks of a build exercise run: the reader's code in a small training, and plain training beside it.

Every rank also trains the whole batch by itself, without any collective: the losses that data parallelism must have.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.ranks.exchange import sum_over_ranks
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.own_module import import_own

BATCH, WIDTH, CLASSES = 24, 10, 5  # a batch over all ranks divides by 2 and 3, and their parts by 4
STEPS = 4
HIDDEN = 101
NET_PARAMS = (WIDTH + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES  # 11,923: neither 2 nor 3 divides it
NET_BYTES = 4 * NET_PARAMS
NET_UNITS = 3  # as `shard_net` cuts it, the root included
BUCKET_SIZES = (41_000, 1_000_000)  # the largest gradient fits into either, all of them fit into the second
BLOCKS, BLOCK_WIDTH, TOKENS = 8, 48, 4
LOOP_STEPS, KILLED_IN_STEP = 9, 5
KILLED_STATUS = 77
KILLED = f"exit status {KILLED_STATUS}"
PARTS = 4


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


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable = list) -> list[float]:
    """Training in one process; `after_step()` is called after each step."""
    losses = []
    for step in range(LOOP_STEPS):
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


def train_readers_unit(
    rank: int, world_size: int, module: str
) -> tuple[list[float], list[float], int, int, dict[str, int]]:
    """Losses, those of one process, values of the slice, bytes held between steps, collectives of a step by kind."""
    unit_class = import_own(module, "Unit")
    model = build_net()
    right = plain_losses(model, adam(list(model.parameters())))[:STEPS]
    del model
    losses = []
    with trace_memory("cpu") as trace:
        model = build_net()
        unit = unit_class(model, rank, world_size)
        if not isinstance(getattr(unit, "shard", None), nn.Parameter):
            raise TypeError("a Unit needs `shard`, an nn.Parameter that holds this rank's slice")
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
    return over_ranks(losses), right, unit.shard.numel(), last.curve.held_bytes, counts


# ---------------------------------------------------------------- 04


def train_readers_cut(rank: int, world_size: int, module: str) -> tuple[list[float], list[float], list[str], int, int]:
    """Losses, those of one process, names of parameters that are not sharded, the peak and collectives of a step."""
    shard_model = import_own(module, "shard_model")
    model = SmallTransformer()
    right = plain_losses(model, sgd(model))[:STEPS]
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
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return over_ranks(losses), right, whole, last.curve.peak_bytes, len(last.collectives)


# ---------------------------------------------------------------- 06


def run_readers_loop(
    rank: int, world_size: int, module: str, folder: str, killed_in_step: int | None
) -> tuple[dict[int, float], list[float]]:
    """The loss of each step that the reader's loop took, and those of an undisturbed run in one process."""
    train_loop = import_own(module, "train_loop")
    model = shard_net(world_size)
    optimizer = adam(list(model.parameters()))
    taken = {}

    def loss_of(model: nn.Module, step: int) -> Tensor:
        if step == killed_in_step:
            dist.barrier()  # no rank is still saving
            os._exit(KILLED_STATUS)
        loss = mean_loss(model, *own_part(step, rank, world_size))
        taken[step] = loss.detach()
        return loss

    train_loop(model, optimizer, falling_rate(optimizer), loss_of, folder, LOOP_STEPS)
    losses = over_ranks(list(taken.values())) if taken else []
    plain = build_net()
    optimizer = adam(list(plain.parameters()))
    return dict(zip(taken, losses, strict=True)), plain_losses(plain, optimizer, falling_rate(optimizer).step)


def falling_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that computes the rate from its own count of steps; others go on from the rate in the optimiser."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.7**steps)


# ---------------------------------------------------------------- 07


def accumulate_by_reader(rank: int, world_size: int, module: str) -> list[dict[str, object]]:
    """Of each step: reduce-scatters, the reader's norm, the norm of what was added up, and that of one process."""
    add_up_gradients, gradient_norm = (import_own(module, name) for name in ("add_up_gradients", "gradient_norm"))
    model, plain = shard_net(world_size), build_net()
    optimizers = sgd(model), sgd(plain)
    answers = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_loss(plain, *load_batch(step)).backward()
        inputs, labels = own_part(step, rank, world_size)
        with trace_collectives() as seen:
            add_up_gradients(model, list(zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True)), mean_loss)
        reduced = sum(event.op == "reduce_scatter" for event in seen)
        answers.append({"reduced": reduced})
        if not reduced:
            return answers
        answers[-1] |= {
            "given_norm": as_number(gradient_norm(model)),
            "norm": norm_of([parameter.grad.full_tensor() for parameter in model.parameters()]),
            "right_norm": norm_of([parameter.grad for parameter in plain.parameters()]),
        }
        for optimizer in optimizers:
            optimizer.step()
    return answers


def norm_of(gradients: list[Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def as_number(given: object) -> float | str:
    """A number, or a tensor that holds one, as a float; of anything else the name of its type."""
    if isinstance(given, DTensor):
        given = given.to_local()  # what a program would work with: this rank's share of it
    return float(given) if isinstance(given, int | float | Tensor) else type(given).__name__
