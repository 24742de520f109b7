"""The small training run shared by the coding exercises: a model, batches, optimizers and the right losses.

Every rank also trains alone on the full batch, without collectives; any data-parallel run must get the same
losses.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.ranks.group import sum_over_ranks

BATCH, WIDTH, CLASSES = 24, 10, 5  # the global batch splits evenly across 2 or 3 ranks, and each rank's batch into 4
STEPS = 4
HIDDEN = 101
NET_PARAMS = (WIDTH + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES  # 11,923: not a multiple of 2 or 3
NET_UNITS = 3  # in the model from `shard_net`, including the root
BLOCKS, BLOCK_WIDTH, TOKENS = 8, 48, 4


def build_net() -> nn.Sequential:
    """Build a model of three linear layers, with the same values on every rank: (B, WIDTH) -> (B, CLASSES)."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers)


def shard_net(world_size: int) -> nn.Sequential:
    """Build the same model and shard it: two layers are separate units, and the third belongs to the root."""
    model, mesh = build_net(), init_device_mesh("cpu", (world_size,))
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=mesh)
    return model


def load_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the global batch across all ranks: inputs (BATCH, WIDTH) and labels (BATCH,)."""
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :CLASSES].argmax(dim=-1)


def rank_batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return a rank's part of `load_batch`: inputs (B, WIDTH) and labels (B,), where B is BATCH / world_size."""
    inputs, labels = load_batch(step)
    return inputs.chunk(world_size)[rank], labels.chunk(world_size)[rank]


def mean_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, a scalar, over inputs (B, WIDTH) with labels (B,)."""
    return F.cross_entropy(model(inputs), labels)


def over_ranks(losses: list[Tensor]) -> list[float]:
    """Return the mean of each loss, a scalar, across ranks."""
    return (sum_over_ranks(torch.stack(losses)) / dist.get_world_size()).tolist()


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable = list, num_steps: int = STEPS
) -> list[float]:
    """Train on full batches, calling `after_step()` after each step; return the losses."""
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = mean_loss(model, *load_batch(step))
        loss.backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


def train_averaging(model: nn.Module, rank: int, world_size: int, average: Callable[[], None]) -> list[float]:
    """Train for a few steps, calling `average()` between backward and the optimizer step; return the losses."""
    optimizer = sgd(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, *rank_batch(step, rank, world_size))
        loss.backward()
        average()
        optimizer.step()
        losses.append(loss.detach())
    return over_ranks(losses)


def full_gradient(model: nn.Module) -> Tensor:
    """Return the full gradient as one vector, (number of parameters,), on every rank."""
    return torch.cat([getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)().flatten() for p in model.parameters()])


def build_blocks() -> nn.ModuleList:
    """Build the equal blocks of a transformer: (B, TOKENS, BLOCK_WIDTH) -> the same."""
    settings = {"dropout": 0.0, "batch_first": True}
    return nn.ModuleList(nn.TransformerEncoderLayer(BLOCK_WIDTH, 4, 4 * BLOCK_WIDTH, **settings) for _ in range(BLOCKS))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an SGD optimizer. SGD's losses show whether gradients were averaged or summed; Adam's would hide it."""
    return torch.optim.SGD(model.parameters(), lr=0.3)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an Adam optimizer with an `eps` so large that the losses also show whether gradients were averaged."""
    return torch.optim.Adam(parameters, lr=0.1, eps=0.1)
