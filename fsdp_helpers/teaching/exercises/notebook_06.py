"""Exercises for notebook 06: checkpoint size and files, the interval between saves, and a loop that resumes."""

import io
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.teaching.exercises.answers import (
    DRAW,
    FRESH_CASES,
    NotYet,
    call,
    exercise,
    expect,
    expect_number,
    expect_whole_number,
    in_short,
)
from fsdp_helpers.teaching.exercises.on_ranks import TOLERANCE, import_from_reader, read_module, run_on_ranks
from fsdp_helpers.teaching.exercises.small_net import (
    adam,
    build_net,
    load_batch,
    mean_loss,
    over_ranks,
    plain_losses,
    rank_batch,
    shard_net,
)

FLAT = 1e-4  # the time lost barely changes near the best interval: being off by 1% costs half of this
LOOP_STEPS = 17
SAVED_EVERY = 2
KILLED_AFTER = 14  # steps, in the save that follows; above 9, where names without leading zeros sort wrongly
IN_SAVE, IN_STEP = 77, 78  # exit statuses
NEWEST_WHOLE = {IN_SAVE: KILLED_AFTER - SAVED_EVERY, IN_STEP: KILLED_AFTER}  # steps, in the checkpoint to continue from
BACKGROUND_S = 0.4  # how long a save in the background gets
MISMATCH = (
    "does every rank call `get_state_dict`, `dcp.save` and `dcp.load`, or only rank 0? It may only write a file alone",
    "hang-gather-on-rank-0",
)


@exercise("06")
def check_checkpoint_bytes(checkpoint_bytes: Callable[[int], float] | None) -> str:
    """Notebook 06: check the number of bytes in an fp32 checkpoint with Adam state, for any strategy and world size."""
    for num_params in (1_199_882, 7 * 10**9, *(DRAW.randint(1, 10**10) for _ in range(FRESH_CASES))):
        given = call(checkpoint_bytes, num_params)
        expect_number(given)
        expect(
            abs(given - 12 * num_params) < 1,
            f"for {format_count(num_params)} parameters, your function returns {format_bytes(int(given))}, too"
            f" {'much' if given > 12 * num_params else 'little'}; which"
            " values does the next step need for each parameter?",
        )
    return "Right: 12 P bytes, for any number of ranks."


@exercise("06")
def check_ranks_to_read(ranks_to_read: Callable[[int, int, int, int], list[int]] | None) -> str:
    """Notebook 06: check which old ranks' files a new rank opens for a tensor sharded by rows."""
    draw = DRAW.randint
    fresh = [(draw(1, 200), draw(1, 9), draw(1, 9)) for _ in range(4 * FRESH_CASES)]
    # the same number of ranks; rows for only three of four ranks; ranges that touch but don't overlap; padding
    # after the last row that two ranks would share
    edges = (12, 4, 4), (5, 4, 4), (3, 2, 4), (12, 4, 3), (12, 4, 1), (128, 4, 3), (10, 4, 2)
    for num_rows, saved, loading in (*edges, *fresh):
        for rank in range(loading):
            given = call(ranks_to_read, num_rows, saved, loading, rank)
            _expect_files(given, num_rows, saved, _rows(num_rows, loading, rank), f"read by {loading}, rank {rank}")
    return "Right: a rank opens the files whose rows overlap its own, and no others."


def _expect_files(given: Any, num_rows: int, saved: int, mine: range, reader: str) -> None:
    """Raise NotYet unless `given` lists the old ranks whose rows overlap `mine`, each once, in any order."""
    expect(
        isinstance(given, list | tuple | range | set), f"the answer is {in_short(given)}; it should be a list of ranks"
    )
    for old in given:
        expect_whole_number(old)
    right = [old for old in range(saved) if set(mine) & set(_rows(num_rows, saved, old))]
    keeps = f"keeps rows {mine[0]} to {mine[-1]}" if mine else "keeps no rows"
    says = f"of {num_rows} rows written by {saved} ranks and {reader} {keeps}; your function returns {list(given)}: "
    expect(set(given) <= set(right), f"{says}some of these files have none of that rank's rows")
    expect(set(given) >= set(right), f"{says}some of that rank's rows are in other files")
    expect(len(given) == len(right), f"{says}a file is listed twice")


def _rows(num_rows: int, world_size: int, rank: int) -> range:
    """Return the rows that FSDP gives a rank, splitting as `torch.chunk` does; the last ranks may get none."""
    rows_a_rank = -(-num_rows // world_size)
    return range(min(rank * rows_a_rank, num_rows), min((rank + 1) * rows_a_rank, num_rows))


@exercise("06")
def check_saving_interval(interval_s: Callable[[float, float], float] | None) -> str:
    """Notebook 06: check the checkpoint interval in seconds that minimizes lost time (Young's formula)."""
    draw = DRAW.uniform
    for save_s, between_failures_s in (
        (10.0, 86_400.0),
        *((draw(0.5, 60), draw(3_600, 1e6)) for _ in range(FRESH_CASES)),
    ):
        given = call(interval_s, save_s, between_failures_s)
        expect_number(given)
        expect(given > 0, f"the answer is {given:,.1f} s; an interval has to be above 0")
        saving, lost_work = save_s / given, given / (2 * between_failures_s)
        least = 2 * (save_s / (2 * between_failures_s)) ** 0.5  # both are equal at the best interval
        expect(
            saving + lost_work <= (1 + FLAT) * least,
            f"with saves of {save_s:.1f} s and a failure every {between_failures_s:,.0f} s, your function returns "
            f"{given:,.1f} s, so {saving:.2%} of the time is spent on saves and {lost_work:.2%} on lost work; "
            "a different interval costs less",
        )
    return "Right: the square root of 2 x save time x time between failures."


@exercise("06")
def check_loop(module: str = "my_loop", ranks: tuple[int, int] = (3, 2)) -> str:
    """Notebook 06: check `train_loop(...)` when it's killed on `ranks[0]` ranks and resumed on `ranks[1]`."""
    read_module(module, "train_loop")
    killed_on, resumed_on = ranks
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
        status = _run_until_killed(module, killed_on, folder)
        when = f"in the save after step {KILLED_AFTER}"
        if status == IN_STEP:
            when = f"in step {KILLED_AFTER + 2}"
        says = f"killed {when} on {killed_on} ranks and started again on {resumed_on}, your loop "
        try:
            found = run_on_ranks(run_readers_loop, module, resumed_on, folder, False, mismatch=MISMATCH)
        except NotYet as failure:
            doubt = "; are all the files it finds complete?" if "save-half-written" in failure.failures else ":"
            raise NotYet(f"{says}fails{doubt} {failure.message}", *failure.failures) from None
    losses, right, is_new = found[0]
    _expect_resumed(list(losses), NEWEST_WHOLE[status], says, is_new)
    _expect_right(losses, right, says, is_new)
    return f"Right: killed on {killed_on} ranks, resumed on {resumed_on}, with the losses of an uninterrupted run."


def _run_until_killed(module: str, world_size: int, folder: str) -> int:
    """Run the reader's loop until it's killed, as if its machine had died, and return the exit status."""
    try:
        run_on_ranks(run_readers_loop, module, world_size, folder, True, mismatch=MISMATCH)
    except NotYet as failure:
        for status in (IN_SAVE, IN_STEP):
            if f"exit status {status}" in str(failure):
                return status
        raise
    raise NotYet(f"on {world_size} ranks, your loop ends before step {KILLED_AFTER + 2}")


def _expect_resumed(steps: list[int], newest_whole: int, says: str, is_new: bool) -> None:
    """Raise NotYet unless the `steps` passed to `loss_of` continue from the newest complete checkpoint."""
    expect(bool(steps), f"{says}doesn't take any steps")
    expect(steps[0] > 0 or not is_new, f"{says}starts at step 1, so nothing was loaded")
    expect(steps[0] > 0, f"{says}starts at step 1 again, but with loaded parameters; which step comes after the save?")
    expect(
        steps[0] == newest_whole,
        f"{says}continues with step {steps[0] + 1}; it saves after every second step, so it should load the newest "
        f"complete checkpoint",
    )
    expected = list(range(newest_whole, LOOP_STEPS))
    expect(steps == expected, f"{says}takes steps {[step + 1 for step in steps]} instead of taking each step once")


def _expect_right(losses: dict[int, float], right: list[float], says: str, is_new: bool) -> None:
    """Raise NotYet unless `losses` match those of an uninterrupted run, with what the first wrong one suggests."""
    for step, loss in losses.items():
        off = f"{says}has a loss of {loss:.5f} in step {step + 1}, but an uninterrupted run has {right[step]:.5f}; "
        if step > min(losses):
            off += "the parameters were right at the start, so what else does a step depend on?"
            failures = ["save-plain-optimizer-state", "save-schedule-lost"]
        elif is_new:
            off, failures = f"{off}that's the loss of a new model, so what was loaded isn't in it", ["save-not-set"]
        else:
            off, failures = f"{off}does everything your loop loads come from the same save?", []
        expect(abs(loss - right[step]) < TOLERANCE, off, *failures)


def run_readers_loop(
    rank: int, world_size: int, module: str, folder: str, is_killed: bool
) -> tuple[dict[int, float], list[float], bool]:
    """Return the reader's losses by step, those of an uninterrupted process, and whether the first is a new model's.

    If `is_killed` is true, all ranks exit during the save after KILLED_AFTER steps. If that save doesn't use DCP or
    `torch.save`, they exit in a step soon after it.
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
        loss = mean_loss(model, *rank_batch(step, rank, world_size))
        taken[step] = loss.detach()
        return loss

    with cut_short(taken if is_killed else {}):
        train_loop = import_from_reader(module, "train_loop")
        train_loop(model, optimizer, falling_rate(optimizer), loss_of, folder, LOOP_STEPS)
    losses = over_ranks(list(taken.values())) if taken else []
    plain = build_net()
    with torch.no_grad():
        new = [mean_loss(plain, *load_batch(step)).item() for step in list(taken)[:1]]  # before any step
    optimizer = adam(list(plain.parameters()))
    right = plain_losses(plain, optimizer, falling_rate(optimizer).step, num_steps=LOOP_STEPS)
    return dict(zip(taken, losses, strict=True)), right, np.allclose(new, losses[:1], atol=TOLERANCE)


def falling_rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that computes the learning rate from its step count, not from the optimizer's current rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.7**steps)


@contextmanager
def cut_short(taken: dict[int, Tensor]):
    """Inside the `with` block, cut short the save once KILLED_AFTER steps have `taken` losses, scalars, and then exit.

    With DCP, write only rank 0's file; with `torch.save`, write half of the file.
    """
    dying = dist.new_group(timeout=timedelta(seconds=5))  # a separate group, since a save may run in a thread
    write_data, save = FileSystemWriter.write_data, torch.save

    def write_some_data(writer: FileSystemWriter, plan: object, planner: object) -> Any:
        if len(taken) != KILLED_AFTER:
            return write_data(writer, plan, planner)
        if dist.get_rank() == 0:
            write_data(writer, plan, planner).wait()
        with suppress(RuntimeError):  # if only rank 0 saves, the other ranks never get here
            dist.barrier(dying)
        os._exit(IN_SAVE)

    def save_half(value: Any, file: object, *arguments: object, **settings: object) -> None:
        if len(taken) != KILLED_AFTER or not isinstance(file, str | os.PathLike):  # DCP passes an open file
            return save(value, file, *arguments, **settings)
        whole = io.BytesIO()
        save(value, whole)
        Path(file).write_bytes(whole.getvalue()[: whole.tell() // 2])
        os._exit(IN_SAVE)

    with patch.object(FileSystemWriter, "write_data", write_some_data), patch.object(torch, "save", save_half):
        yield
