"""Code shared by notebook 14's two jobs (DDP and FSDP2), and a comparison of their checkpoints.

The jobs themselves are cells in the notebook.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_helpers.data.images import Dataset, load_data
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.ranks.group import rank_device

TRAIN_IMAGES = 384  # eight steps per epoch, so a run of twenty steps ends in the middle of the third
TEST_IMAGES = 120
GLOBAL_BATCH = 48  # images per step, across all ranks and micro-batches
PARTS = 2  # micro-batches per step
EVALUATE_EVERY = 5  # steps
KEPT = 0.9  # the share of the weights' running average that a step keeps
MAX_NORM = 1.0
LEARNING_RATE = 1e-3
WARM_UP = 4  # steps


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a training run: the files it reads and writes, and its last step."""

    last_step: int
    resume_from: str | None = None
    save_to: str | None = None
    seed: int = 0


@dataclass(kw_only=True)
class Record:
    """A job's report: the loss and gradient norm in each step, and the held-out loss of the averaged weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # this rank's learning rate in each step
    parameter_bytes: int = 0  # of the trained model, on this rank

    def add(self, loss: Tensor, norm: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Record a finished step, with its mean loss across ranks; every rank has to call this."""
        self.losses.append(mean_over_ranks(loss))
        self.norms.append(norm.item())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def curves(self) -> tuple[list[float], list[float], list[float]]:
        """Return the curves that must be the same in two runs."""
        return self.losses, self.norms, self.held_out


def differences(baseline: Record, run: Record) -> list[float]:
    """Return the largest differences in loss, norm and held-out loss between `run` and the end of the baseline."""
    pairs = zip(baseline.curves(), run.curves(), strict=True)
    return [max(abs(a - b) for a, b in zip(long[-len(end) :], end, strict=True)) for long, end in pairs]


# ---------------------------------------------------------------- the parts that stay


def build_model(seed: int) -> ViT:
    """Return the model; with the same seed, every rank draws the same weights."""
    torch.manual_seed(seed)
    return ViT(VIT_SHAPES["vit-mnist"])


def make_optimizer(model: nn.Module) -> AdamW:
    """Return AdamW with two groups: weights with weight decay, biases and norms without."""
    decaying, constant = [], []
    for name, own in model.named_parameters():  # by name: FSDP1's parameters are flat, so their shapes say nothing
        (constant if name.endswith("bias") or "norm" in name else decaying).append(own)
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": constant, "weight_decay": 0.0}]
    return AdamW(groups, lr=LEARNING_RATE)


def make_schedule(optimizer: AdamW) -> LambdaLR:
    """Return a schedule that rises for a few steps and then decays."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 0.97**step))


def load_steps(rank: int, world_size: int, first_step: int, last_step: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's micro-batches of each step, starting with `first_step`, even in the middle of an epoch."""
    digits = load_data(train_images=TRAIN_IMAGES).train
    dataset = TensorDataset(digits.images, digits.labels)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // PARTS // world_size, sampler=sampler)
    steps_per_epoch = TRAIN_IMAGES // GLOBAL_BATCH
    for step in range(first_step, last_step):
        epoch, place = divmod(step, steps_per_epoch)
        if place == 0 or step == first_step:
            sampler.set_epoch(epoch)  # otherwise every epoch has the same order
            batches = islice(loader, place * PARTS, None)  # skip the steps of an earlier job
        parts = [next(batches) for _ in range(PARTS)]
        yield [(images.to(rank_device()), labels.to(rank_device())) for images, labels in parts]


def load_test() -> Dataset:
    """Return the held-out images."""
    return load_data(test_images=TEST_IMAGES).test


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module) -> None:
    """Move the running average (EMA) of the weights a little toward the model's weights."""
    for mean, own in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(own, 1 - KEPT)


@torch.no_grad()
def sum_losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, reduction="sum")


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# ---------------------------------------------------------------- checking the move


def shard(model: ViT, mesh: dist.DeviceMesh) -> ViT:
    """Shard in place: a unit per block, and the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local_bytes(model: nn.Module) -> int:
    """Return the parameter bytes on this rank."""
    own = [value.to_local() if isinstance(value, DTensor) else value for value in model.parameters()]
    return sum(value.nbytes for value in own)


def compare_checkpoints(first: str, second: str) -> dict[str, tuple[int, int, float]]:
    """Return the tensors, values and largest difference in each part of two files of `save_ddp`.

    Raises ValueError if their tensors have different names.
    """
    parts = [tensors_by_part(torch.load(path, weights_only=True)) for path in (first, second)]
    compared = {}
    for part, tensors in parts[0].items():
        others = parts[1][part]
        if tensors.keys() != others.keys():
            raise ValueError(f"{part}: the files differ in {sorted(tensors.keys() ^ others.keys())}")
        largest = max((value - others[name]).abs().max().item() for name, value in tensors.items())
        compared[part] = len(tensors), sum(value.numel() for value in tensors.values()), largest
    return compared


def tensors_by_part(checkpoint: dict) -> dict[str, dict[str | int, Tensor]]:
    """Return the weights, averaged weights, two Adam moments and step counters, each keyed by name or number."""
    adam = checkpoint["optimizer"]["state"]
    moments = {key: {number: state[key] for number, state in adam.items()} for key in ("exp_avg", "exp_avg_sq", "step")}
    return {"model": checkpoint["model"], "average": checkpoint["average"], **moments}
