"""A training job with everything that makes a move hard, under DDP and under FSDP2. Every rank imports this module.

A frozen block, an embedding tied to a head, a scalar parameter, a BatchNorm that stays in eval mode, two heads of which
each sample uses one (so the ranks differ), a layer that no loss reaches at first, two groups of parameters, a schedule,
micro-batches, clipping, and a running average of the weights.
"""

import copy
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from take_home_workers import load_script
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

WORDS, WIDTH, CLASSES = 20, 12, 5
BATCH, PARTS = 24, 2  # samples per step, over all ranks and micro-batches
MAX_NORM, KEPT = 0.5, 0.9
LATE = 7  # the step from which on `late` is trained
SAVE_EVERY = 3


class AwkwardModel(nn.Module):
    """(B,) words, the head and the label of each -> their summed loss. `scale_shape` is () or, under FSDP2, (1,)."""

    def __init__(self, scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks[0].requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))
        self.late = nn.Linear(WIDTH, CLASSES)
        self.decode = nn.Linear(WIDTH, WORDS, bias=False)
        self.decode.weight = self.embed.weight
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def train(self, mode: bool = True) -> "AwkwardModel":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, words: Tensor, kinds: Tensor, labels: Tensor, step: int) -> Tensor:
        hidden = self.embed(words)  # (B, WIDTH)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        hidden = self.norm(hidden) * self.scale
        loss = F.cross_entropy(self.decode(hidden), (7 * words + 1) % WORDS, reduction="sum")
        for kind, head in enumerate(self.heads):
            if (mine := kinds == kind).any():
                loss = loss + F.cross_entropy(head(hidden[mine]), labels[mine], reduction="sum")
        if step >= LATE:
            loss = loss + F.cross_entropy(self.late(hidden), labels, reduction="sum")
        return loss


def build_model(scale_shape: tuple[int, ...] = (1,), seed: int = 0) -> AwkwardModel:
    torch.manual_seed(seed)
    return AwkwardModel(scale_shape).train()


def make_optimizer(model: nn.Module) -> AdamW:
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name.endswith(("bias", "norm.weight", "scale"))]["params"].append(parameter)
    return AdamW(groups, lr=1e-2)


def make_schedule(optimizer: AdamW) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min((step + 1) / 5, 0.95**step))


def parts_of(step: int, rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """This rank's micro-batches. Its samples mostly have the same head; in every fifth step no rank uses the second."""
    words = torch.randint(WORDS, (BATCH,), generator=torch.Generator().manual_seed(step))
    kinds = torch.zeros_like(words) if step % 5 == 4 else (torch.arange(BATCH) >= BATCH // 2).long()
    columns = [whole.chunk(world_size)[rank].chunk(PARTS) for whole in (words, kinds, words % CLASSES)]
    return list(zip(*columns, strict=True))


def loss_of(model: nn.Module, part: tuple[Tensor, Tensor, Tensor], step: int) -> Tensor:
    return model(*part, step) * dist.get_world_size() / BATCH


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module) -> None:
    for mean, own in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(own, 1 - KEPT)


def seen(loss: Tensor, norm: Tensor, average: nn.Module) -> list[float]:
    """The mean loss over the ranks, the gradient's norm, and a sum over the average."""
    loss = loss.clone()
    dist.all_reduce(loss)
    averages = [getattr(mean, "full_tensor", lambda mean=mean: mean)() for mean in average.parameters()]
    return [loss.item() / dist.get_world_size(), norm.item(), sum(mean.double().sum().item() for mean in averages)]


# ---------------------------------------------------------------- under DDP


def train_ddp(rank: int, world_size: int, path: str, saved_at: int, last_step: int) -> list[list[float]]:
    """Train to the end; write `path` after `saved_at` steps."""
    model = DistributedDataParallel(build_model(scale_shape=()), find_unused_parameters=True)
    average = copy.deepcopy(model.module)
    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer)
    steps = []
    for step in range(last_step):
        if step == saved_at and rank == 0:
            state = {"model": model.state_dict(), "average": average.state_dict(), "step": step}
            torch.save(state | {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, path)
        optimizer.zero_grad()
        loss_of_step = torch.zeros(())
        for index, part in enumerate(parts_of(step, rank, world_size)):
            with nullcontext() if index == PARTS - 1 else model.no_sync():
                loss = loss_of(model, part, step)
                loss.backward()
            loss_of_step += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        update_average(average, model.module)
        steps.append(seen(loss_of_step, norm, average))
    return steps


# ---------------------------------------------------------------- under FSDP2


def shard(model: AwkwardModel, world_size: int) -> AwkwardModel:
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # tied ends, scalar and heads: a rank that skips a head still takes part in its unit
    model.set_reduce_scatter_unused_params(True)
    return model


def forget_unused(model: nn.Module) -> None:
    """Take the zeros from parameters that no rank used, or Adam would move them, as DDP does not."""
    reached = [parameter for parameter in model.parameters() if parameter.grad is not None]
    used = torch.stack([parameter.grad.to_local().any() for parameter in reached]).int()
    dist.all_reduce(used)
    for parameter, number in zip(reached, used.tolist(), strict=True):
        if not number:
            parameter.grad = None


def train_fsdp2(
    rank: int, world_size: int, path: str, folder: str, log: str, last_step: int, killed_at: int = -1
) -> list[list[float]]:
    """Go on from the newest checkpoint in `folder`, else from DDP's file; rank 0 adds each step to `log`."""
    moving, saving = load_script("from_ddp.py"), load_script("checkpoint.py")
    moving.build_model, moving.make_optimizer = build_model, make_optimizer
    model, average = (shard(build_model(seed=1 + rank), world_size) for _ in range(2))
    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer)
    keep_average(saving, average)
    first_step = saving.load_newest(Path(folder), model, optimizer, schedule)
    if not first_step:
        first_step = moving.load_ddp_checkpoint(path, model, optimizer, schedule)
        load_average(path, average)
    for step in range(first_step, last_step):
        optimizer.zero_grad()
        loss_of_step = torch.zeros(())
        for index, part in enumerate(parts_of(step, rank, world_size)):
            model.set_requires_gradient_sync(index == PARTS - 1)
            loss = loss_of(model, part, step)
            loss.backward()
            loss_of_step += loss.detach()
        forget_unused(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor()
        optimizer.step()
        schedule.step()
        update_average(average, model)
        found = seen(loss_of_step, norm, average)
        if rank == 0:
            with open(log, "a") as file:
                print(step, *found, file=file)
        if (step + 1) % SAVE_EVERY == 0:
            with killed_in_save() if step + 1 == killed_at else nullcontext():
                saving.save_checkpoint(Path(folder), saving.state_to_keep(model, optimizer, schedule, step + 1))


def keep_average(saving: ModuleType, average: nn.Module) -> None:
    """Make the average a part of what the script saves; loading fills its shards in place."""
    plain = saving.state_to_keep
    saving.state_to_keep = lambda *state, **step: plain(*state, **step) | {"average": get_model_state_dict(average)}


def load_average(path: str, average: nn.Module) -> None:
    """As for the model: rank 0 reads, with the scalar in its new shape, and hands out shards."""
    weights = {}
    if dist.get_rank() == 0:
        weights = torch.load(path, weights_only=True)["average"]
        weights["scale"] = weights["scale"].reshape(1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(average, weights, options=options)


def killed_in_save():
    """Within the block, rank 0 writes its file of a checkpoint, and then rank 1 is killed."""
    write_data = FileSystemWriter.write_data

    def write_and_die(writer: FileSystemWriter, plan: object, planner: object) -> object:
        if dist.get_rank() == 0:
            written = write_data(writer, plan, planner)
            written.wait()
            dist.barrier()
            return written
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    return patch.object(FileSystemWriter, "write_data", write_and_die)
