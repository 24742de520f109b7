"""FSDP by hand with several units: hooks unshard and reshard them, and storage is emptied while autograd holds on to it.

Chapter 04 has the class and the two functions that use it in its cells; a test compares them with these.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models.series import build_model
from fsdp_helpers.ranks.group import rank_device, sum_over_ranks
from fsdp_helpers.training.worker import first_batches


class HookedUnit:
    """A unit that unshards itself before its module computes, and reshards itself afterward.

    The parameters are views of one flat tensor, `full`, for as long as they live. To reshard is to empty its *storage*:
    autograd keeps the views that backward needs, but no bytes. To unshard is to fill it again.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, world_size: int) -> None:
        self.parameters, self.world_size = parameters, world_size
        self.full = self._flatten([parameter.data for parameter in parameters])
        self.num_bytes = self.full.nbytes
        self.shard = nn.Parameter(self.full.chunk(world_size)[rank].clone())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, view in zip(parameters, self.full[: sum(sizes)].split(sizes), strict=True):
            parameter.data = view.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)
        self.gathering: dist.Work | None = None
        self.reshard()

    def start_unshard(self) -> None:
        """Begin the all-gather, unless it has begun already."""
        if self.gathering is None:
            self.full.untyped_storage().resize_(self.num_bytes)
            self.gathering = dist.all_gather_into_tensor(self.full, self.shard.data, async_op=True)

    def unshard(self) -> None:
        """Let the module compute with full parameters."""
        self.start_unshard()
        self.gathering.wait()

    def reshard(self) -> None:
        """Keep the shard only, whoever still holds the parameters."""
        self.full.untyped_storage().resize_(0)
        self.gathering, self.num_missing = None, len(self.parameters)

    def _gradient_arrived(self, _: Tensor) -> None:
        self.num_missing -= 1
        if self.num_missing == 0:  # backward is done with this unit
            self.reduce_gradients()
            self.reshard()

    def reduce_gradients(self) -> None:
        """Reduce-scatter the gradients: each rank gets its shard of the mean, and the full gradients are freed."""
        full = self._flatten([parameter.grad for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, full)
        self.shard.grad /= self.world_size

    def _flatten(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.world_size))


def shard_by_hand(model: nn.Module, rank: int, world_size: int) -> list[nn.Parameter]:
    """Make each of `model.blocks` a unit, and a root of the rest; return what the optimizer steps, the shards."""
    in_blocks = set(model.blocks.parameters())
    root = HookedUnit([p for p in model.parameters() if p not in in_blocks], rank, world_size)
    model.register_forward_pre_hook(lambda *_: root.unshard())  # until its last gradient has arrived
    units = [HookedUnit(list(block.parameters()), rank, world_size) for block in model.blocks]
    for block, unit in zip(model.blocks, units, strict=True):
        block.register_forward_pre_hook(lambda *_, unit=unit: unit.unshard())
        block.register_forward_hook(lambda *_, unit=unit: unit.reshard())
        block.register_full_backward_pre_hook(lambda *_, unit=unit: unit.unshard())
    for block, before in zip(model.blocks[1:], units, strict=False):
        block.register_full_backward_pre_hook(lambda *_, before=before: before.start_unshard())  # one unit ahead
    return [unit.shard for unit in (root, *units)]


def shard_by_torch(model: nn.Module, rank: int, world_size: int) -> list[nn.Parameter]:
    """Make the same units with FSDP2: each block, and the root last."""
    mesh = init_device_mesh(rank_device().type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return list(model.parameters())


def train_in_units(
    rank: int, world_size: int, config: TrainConfig, shard: Callable[[nn.Module, int, int], list[nn.Parameter]]
) -> list[float]:
    """Train a model that `shard` has divided into units; the loop is that of plain training."""
    batches = first_batches(rank, world_size, config)
    torch.manual_seed(config.seed)  # every rank begins with the same values
    model = build_model(config.model, dropout=config.dropout).to(rank_device())
    optimizer = torch.optim.Adam(shard(model, rank, world_size), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks

    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return (sum_over_ranks(torch.stack(losses)) / world_size).tolist()
