"""A training job under DDP, and the same job under FSDP2, which goes on from the other's checkpoint. For notebook 14."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_helpers.data.images import load_data
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.ranks.group import rank_device

TRAIN_IMAGES = 384  # eight steps to an epoch, so that a run of twenty steps ends within its third
TEST_IMAGES = 120
GLOBAL_BATCH = 48  # images per step, over all ranks and parts
PARTS = 2  # micro-batches per step
EVALUATE_EVERY = 5  # steps
KEPT = 0.9  # of the running average of the weights, per step
MAX_NORM = 1.0
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a training run: the files that it reads and writes, and the step that it ends with."""

    last_step: int
    resume_from: str | None = None
    save_to: str | None = None
    seed: int = 0


@dataclass(kw_only=True)
class Record:
    """The report of a job: a loss and a gradient norm per step, and the average's loss on images held out."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    parameter_bytes: int = 0  # of the trained model, on this rank

    def curves(self) -> tuple[list[float], list[float], list[float]]:
        """Return what two runs must have alike."""
        return self.losses, self.norms, self.held_out


# ---------------------------------------------------------------- what stays as it is


def build_model(seed: int) -> ViT:
    """Return the model; with the same seed, every rank draws the same weights."""
    torch.manual_seed(seed)
    return ViT(VIT_SHAPES["vit-mnist"])


def make_optimizer(model: nn.Module) -> AdamW:
    """Return AdamW with two groups: weights decay, biases and norms do not."""
    decaying, constant = [], []
    for name, own in model.named_parameters():  # by name: FSDP1's parameters are flat, so their shapes say nothing
        (constant if name.endswith("bias") or "norm" in name else decaying).append(own)
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": constant, "weight_decay": 0.0}]
    return AdamW(groups, lr=LEARNING_RATE)


def load_steps(rank: int, world_size: int, first_step: int, last_step: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's micro-batches of each step, on from `first_step`, wherever in an epoch that is."""
    digits = load_data(train_images=TRAIN_IMAGES).train
    dataset = TensorDataset(digits.images, digits.labels)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // PARTS // world_size, sampler=sampler)
    steps_per_epoch = TRAIN_IMAGES // GLOBAL_BATCH
    for step in range(first_step, last_step):
        epoch, place = divmod(step, steps_per_epoch)
        if place == 0 or step == first_step:
            sampler.set_epoch(epoch)  # or every epoch has the same order
            batches = islice(loader, place * PARTS, None)  # skip what an earlier job has had
        yield [next(batches) for _ in range(PARTS)]


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module) -> None:
    """Move the running average (EMA) of the weights a little toward the model's."""
    for mean, own in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(own, 1 - KEPT)


@torch.no_grad()
def sum_losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, reduction="sum")


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# ---------------------------------------------------------------- under DDP


def train_ddp(rank: int, world_size: int, job: Job) -> Record:
    """Train under DDP, as many scripts do."""
    device = rank_device()
    model = DistributedDataParallel(build_model(job.seed).to(device), gradient_as_bucket_view=True)
    average = copy.deepcopy(model.module)
    optimizer = make_optimizer(model)
    first_step = 0
    if job.resume_from:
        first_step = load_ddp(job.resume_from, model, average, optimizer)

    record = Record()
    for step, parts in enumerate(load_steps(rank, world_size, first_step, job.last_step), first_step):
        loss_of_step = torch.zeros((), device=device)
        optimizer.zero_grad()
        for index, (images, labels) in enumerate(parts):
            is_last = index == PARTS - 1
            with nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(images.to(device)), labels.to(device)) / PARTS
                loss.backward()
            loss_of_step += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        update_average(average, model.module)
        record.losses.append(mean_over_ranks(loss_of_step))
        record.norms.append(norm.item())
        if (step + 1) % EVALUATE_EVERY == 0 and rank == 0:
            record.held_out.append(evaluate_on_one_rank(average))
    record.parameter_bytes = sum(own.nbytes for own in model.parameters())

    if job.save_to and rank == 0:
        save_ddp(job.save_to, model, average, optimizer, job.last_step)
    return record


def evaluate_on_one_rank(average: nn.Module) -> float:
    """Return the mean loss on the images held out. One rank has the whole model, so it needs no other."""
    test = load_data(test_images=TEST_IMAGES).test.to(rank_device())
    return sum_losses(average, test.images, test.labels).item() / len(test)


def save_ddp(path: str, model: nn.Module, average: nn.Module, optimizer: AdamW, step: int) -> None:
    """Write one file: the model under names with `module.`, Adam's state under numbers."""
    checkpoint = {
        "model": model.state_dict(),
        "average": average.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    torch.save(checkpoint, path)


def load_ddp(path: str, model: nn.Module, average: nn.Module, optimizer: AdamW) -> int:
    """Read that file on every rank; return the number of steps that are done."""
    checkpoint = torch.load(path, map_location=rank_device(), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    average.load_state_dict(checkpoint["average"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


# ---------------------------------------------------------------- under FSDP2


def train_fsdp2(rank: int, world_size: int, job: Job) -> Record:
    """Train under FSDP2; begin with a checkpoint that was saved under DDP, if the job names one."""
    device = rank_device()
    mesh = init_device_mesh(device.type, (world_size,))
    model = shard(build_model(job.seed), mesh)
    average = shard(build_model(job.seed), mesh)
    optimizer = make_optimizer(model)
    first_step = 0
    if job.resume_from:
        first_step = load_from_ddp(job.resume_from, model, average, optimizer)

    record = Record()
    for step, parts in enumerate(load_steps(rank, world_size, first_step, job.last_step), first_step):
        loss_of_step = torch.zeros((), device=device)
        optimizer.zero_grad()
        for index, (images, labels) in enumerate(parts):
            is_last = index == PARTS - 1
            model.set_requires_gradient_sync(is_last)
            loss = F.cross_entropy(model(images.to(device)), labels.to(device)) / PARTS
            loss.backward()
            loss_of_step += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor()
        optimizer.step()
        update_average(average, model)
        record.losses.append(mean_over_ranks(loss_of_step))
        record.norms.append(norm.item())
        if (step + 1) % EVALUATE_EVERY == 0:
            record.held_out.append(evaluate_on_all_ranks(average))
    record.parameter_bytes = sum(own.to_local().nbytes for own in model.parameters())

    if job.save_to:
        save_like_ddp(job.save_to, model, average, optimizer, job.last_step)
    return record


def shard(model: ViT, mesh: dist.DeviceMesh) -> ViT:
    """Shard in place: a unit per block, and the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def evaluate_on_all_ranks(average: nn.Module) -> float:
    """Return the mean loss on the images held out; every rank takes part in every forward, and has its own images."""
    test = load_data(test_images=TEST_IMAGES).test.to(rank_device())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = sum_losses(average, test.images[rank::world_size], test.labels[rank::world_size])
    average.reshard()  # the root is whole after a forward without backward, and updates to it would be lost
    dist.all_reduce(total)
    return total.item() / len(test)


# ---------------------------------------------------------------- the checkpoint, there and back


def load_from_ddp(path: str, model: nn.Module, average: nn.Module, optimizer: AdamW) -> int:
    """Read DDP's checkpoint on rank 0 and hand each rank its shards; return the number of steps that are done."""
    weights, adam, averages, step = {}, {}, {}, [0]
    if dist.get_rank() == 0:
        checkpoint = torch.load(path, mmap=True, weights_only=True)
        consume_prefix_in_state_dict_if_present(checkpoint["model"], "module.")
        plain = build_model(seed=0)
        plain.load_state_dict(checkpoint["model"])
        plain_optimizer = make_optimizer(plain)
        plain_optimizer.load_state_dict(checkpoint["optimizer"])  # by number: 0, 1, 2, ...
        weights, adam = get_state_dict(plain, plain_optimizer)  # by name
        averages = checkpoint["average"]
        step = [checkpoint["step"]]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # One by one: `set_state_dict` would take the other ranks' empty dictionary for a wish to leave the model alone.
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, adam, options=options)
    set_model_state_dict(average, averages, options=options)
    dist.broadcast_object_list(step)
    return step[0]


def save_like_ddp(path: str, model: nn.Module, average: nn.Module, optimizer: AdamW, step: int) -> None:
    """Write the file that DDP's script would have written: the way back. All ranks gather; rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole on rank 0, empty elsewhere
    weights, adam = get_state_dict(model, optimizer, options=options)
    averages = get_state_dict(average, [], options=options)[0]
    if dist.get_rank() == 0:
        plain = build_model(seed=0)
        plain_optimizer = make_optimizer(plain)
        set_state_dict(plain, plain_optimizer, model_state_dict=weights, optim_state_dict=adam)
        checkpoint = {
            "model": {f"module.{name}": value for name, value in weights.items()},
            "average": averages,
            "optimizer": plain_optimizer.state_dict(),
            "step": step,
        }
        torch.save(checkpoint, path)


def compare_checkpoints(one: str, other: str) -> dict[str, tuple[int, int, float]]:
    """Compare two files of `save_ddp` tensor by tensor: by part, tensors, values and the largest difference."""
    parts = [tensors_by_part(torch.load(path, weights_only=True)) for path in (one, other)]
    compared = {}
    for part, tensors in parts[0].items():
        others = parts[1][part]
        if tensors.keys() != others.keys():
            raise ValueError(f"{part}: the files differ in {sorted(tensors.keys() ^ others.keys())}")
        largest = max((value - others[name]).abs().max().item() for name, value in tensors.items())
        compared[part] = len(tensors), sum(value.numel() for value in tensors.values()), largest
    return compared


def tensors_by_part(checkpoint: dict) -> dict[str, dict[str | int, Tensor]]:
    """Return the weights, their average and Adam's two moments and counters, each by name or number."""
    adam = checkpoint["optimizer"]["state"]
    moments = {key: {number: state[key] for number, state in adam.items()} for key in ("exp_avg", "exp_avg_sq", "step")}
    return {"model": checkpoint["model"], "average": checkpoint["average"], **moments}
