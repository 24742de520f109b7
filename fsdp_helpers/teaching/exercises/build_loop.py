"""What ranks run in the build exercise of notebook 06: the reader's loop, killed while it saves, and resumed."""

import io
import os
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from fsdp_helpers.teaching.exercises.build_workers import (
    adam,
    build_net,
    mean_loss,
    over_ranks,
    own_part,
    plain_losses,
    shard_net,
)
from fsdp_helpers.teaching.exercises.own_module import import_own

LOOP_STEPS = 17
SAVED_EVERY = 2
KILLED_AFTER = 14  # steps, during the save that follows; beyond 9, as names that are not padded sort wrongly then
IN_SAVE, IN_STEP = 77, 78  # exit statuses
NEWEST_WHOLE = {IN_SAVE: KILLED_AFTER - SAVED_EVERY, IN_STEP: KILLED_AFTER}  # steps in the checkpoint to go on from
BACKGROUND_S = 0.4  # for a save that goes on beside the steps


def run_readers_loop(
    rank: int, world_size: int, module: str, folder: str, is_killed: bool
) -> tuple[dict[int, float], list[float]]:
    """The loss of each step that the reader's loop took, and those of an undisturbed run in one process.

    With `is_killed` all ranks end in the save after KILLED_AFTER steps or, if that writes nothing that is known here,
    in a step soon after it.
    """
    model = shard_net(world_size)
    optimizer = adam(list(model.parameters()))
    taken = {}

    def loss_of(model: nn.Module, step: int) -> Tensor:
        if is_killed and step >= KILLED_AFTER - 1:
            time.sleep(BACKGROUND_S)
        if is_killed and step == KILLED_AFTER + 1:
            dist.barrier()
            os._exit(IN_STEP)
        loss = mean_loss(model, *own_part(step, rank, world_size))
        taken[step] = loss.detach()
        return loss

    with cut_short(taken if is_killed else {}):
        train_loop = import_own(module, "train_loop")
        train_loop(model, optimizer, falling_rate(optimizer), loss_of, folder, LOOP_STEPS)
    losses = over_ranks(list(taken.values())) if taken else []
    plain = build_net()
    optimizer = adam(list(plain.parameters()))
    right = plain_losses(plain, optimizer, falling_rate(optimizer).step, num_steps=LOOP_STEPS)
    return dict(zip(taken, losses, strict=True)), right


def falling_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that computes the rate from its own count of steps; others go on from the rate in the optimiser."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.7**steps)


@contextmanager
def cut_short(taken: dict[int, Tensor]):
    """Within the block, the save after KILLED_AFTER `taken` steps writes only a part of its files, and ends the rank.

    With DCP rank 0's file is written, and nobody else's. `torch.save` writes half of its file.
    """
    dying = dist.new_group(timeout=timedelta(seconds=5))  # a group of its own: a save may run in a thread
    write_data, save = FileSystemWriter.write_data, torch.save

    def write_some_data(writer: FileSystemWriter, plan: object, planner: object) -> object:
        if len(taken) != KILLED_AFTER:
            return write_data(writer, plan, planner)
        if dist.get_rank() == 0:
            write_data(writer, plan, planner).wait()
        with suppress(RuntimeError):  # where rank 0 saves alone, the others never come
            dist.barrier(dying)
        os._exit(IN_SAVE)

    def save_half(value: object, file: object, *arguments: object, **settings: object) -> None:
        if len(taken) != KILLED_AFTER or not isinstance(file, str | os.PathLike):  # DCP hands over an open file
            return save(value, file, *arguments, **settings)
        whole = io.BytesIO()
        save(value, whole)
        Path(file).write_bytes(whole.getvalue()[: whole.tell() // 2])
        os._exit(IN_SAVE)

    with patch.object(FileSystemWriter, "write_data", write_some_data), patch.object(torch, "save", save_half):
        yield
