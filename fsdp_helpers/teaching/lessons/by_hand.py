"""The workers that notebooks 02 and 03 write by hand; their loops stand in cells there, and a test compares them."""

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


def train_ddp_by_hand(rank: int, world_size: int, config: TrainConfig) -> list[float]:
    """Train data-parallel in a dozen lines: the same model everywhere, gradients averaged after backward."""
    device = rank_device()
    batches = first_batches(rank, world_size, config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, dropout=config.dropout).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # all ranks start from rank 0's copy
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks

    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the sum over all ranks ...
            parameter.grad /= world_size  # ... becomes the mean: the gradient of the whole global batch
        optimizer.step()
        losses.append(loss.item())
    return mean_over_ranks(losses)


class FlatUnit:
    """FSDP's core idea: the parameters of a module as one flat tensor; each rank keeps a shard of it.

    With P parameters and N ranks a shard has ceil(P / N) values; the last one is padded with zeros.
    """

    def __init__(self, module: nn.Module, rank: int, world_size: int) -> None:
        self.world_size = world_size
        self.parameters = list(module.parameters())
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.padding = -sum(self.sizes) % world_size
        full = self.flatten([parameter.data for parameter in self.parameters])
        self.shard = nn.Parameter(full.chunk(world_size)[rank].clone())
        self.reshard()

    def unshard(self) -> None:
        """All-gather the shards of all ranks into the full tensor, and make the module's parameters views of it."""
        full = self.shard.new_empty(sum(self.sizes) + self.padding)
        dist.all_gather_into_tensor(full, self.shard.data)
        views = full[: sum(self.sizes)].split(self.sizes)
        for parameter, shape, view in zip(self.parameters, self.shapes, views, strict=True):
            parameter.data = view.view(shape)

    def reduce_gradients(self) -> None:
        """Reduce-scatter the full gradients: summed over the ranks, so that each rank gets a shard of the mean."""
        full = self.flatten([parameter.grad for parameter in self.parameters])
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, full)
        self.shard.grad /= self.world_size

    def reshard(self) -> None:
        """Keep the shard only."""
        for parameter in self.parameters:
            parameter.data = self.shard.new_empty(0)
            parameter.grad = None

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """Join tensors into one, with zeros at the end."""
        zeros = tensors[0].new_zeros(self.padding)
        return torch.cat([*[tensor.flatten() for tensor in tensors], zeros])


def train_fsdp_by_hand(rank: int, world_size: int, config: TrainConfig) -> list[float]:
    """Train sharded, with one unit: unshard, forward, backward, reduce-scatter, reshard, step on the shard."""
    device = rank_device()
    batches = first_batches(rank, world_size, config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, dropout=config.dropout).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # all ranks start from rank 0's copy
    unit = FlatUnit(model, rank, world_size)  # from here on a rank keeps its shard
    optimizer = torch.optim.Adam([unit.shard], lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks

    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        unit.unshard()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        unit.reduce_gradients()
        unit.reshard()
        optimizer.step()
        losses.append(loss.item())
    return mean_over_ranks(losses)


def train_by_fully_shard(rank: int, world_size: int, config: TrainConfig) -> list[float]:
    """Train sharded by PyTorch, with one unit: FSDP2 unshards, reduces and reshards in its own hooks."""
    device = rank_device()
    batches = first_batches(rank, world_size, config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, dropout=config.dropout).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # all ranks start from rank 0's copy
    mesh = init_device_mesh(device.type, (world_size,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    torch.manual_seed(config.seed + 1 + rank)  # every rank draws its own dropout masks

    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return mean_over_ranks(losses)


def mean_over_ranks(losses: list[float]) -> list[float]:
    """Return the mean over all ranks of each step's loss."""
    return (sum_over_ranks(torch.tensor(losses, device=rank_device())) / dist.get_world_size()).tolist()
