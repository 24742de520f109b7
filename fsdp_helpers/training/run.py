"""Carry out a run, from settings to record: on ranks started here (`train`), or as a rank started by torchrun."""

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

import torch.distributed as dist

from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.checkpointing.resume import Stopped, catching_sigterm, check_checkpoints, remove_unfinished
from fsdp_helpers.config import TrainConfig, require_seconds
from fsdp_helpers.data.source import DataError, num_test_images, num_train_images, prepare_data
from fsdp_helpers.gpus import choose_device, find_gpus, hide_gpus
from fsdp_helpers.notebook import is_notebook, shown_by_message
from fsdp_helpers.progress import ProgressBar, send_reports_to
from fsdp_helpers.quantities import format_count
from fsdp_helpers.ranks.errors import describe_error
from fsdp_helpers.ranks.group import gather_over_ranks, process_group, silent_ranks_named
from fsdp_helpers.ranks.launch import RankError, launch
from fsdp_helpers.records import RunRecord
from fsdp_helpers.training.torchrun import TorchrunRank, read_torchrun_rank
from fsdp_helpers.training.worker import train_worker


def train(
    config: TrainConfig,
    *,
    world_size: int | None = None,
    device: str = "auto",
    timeout_s: float | None = None,
    group_timeout_s: float | None = None,
    progress: bool = True,
    watch: bool = False,
    on_data: Callable[[str], None] | None = None,
    **changes: object,
) -> RunRecord:
    """Run `config`, with `changes` to its fields, in new processes; return rank 0's record.

    `world_size` defaults to 1 for the "local" strategy, otherwise to 2. The data is prepared before any process
    starts, and `on_data` is called with its source (see `prepare_run_data`). With `watch`, a notebook shows a line per
    rank and the loss, step by step; otherwise, there's one line of progress.

    `timeout_s` limits the entire run, and `group_timeout_s` limits a single collective; see `launch`.

    Raises ValueError, DataError or CheckpointError before any process starts, for settings that can't work, data that
    can't be used and checkpoints that don't match; raises RankError and RankTimeout as `launch` does.
    """
    with shown_by_message(ValueError):
        config = replace(config, **changes)
        if world_size is None:
            world_size = 1 if config.strategy == "local" else 2
        device = _check_ranks(config, world_size, device)
        require_seconds(timeout=group_timeout_s)
    watched = watch and progress and is_notebook()
    view = _live_view() if watched else ProgressBar()
    starting = f"training, {format_count(world_size, 'rank')} on {device}"
    with closing(view):
        with shown_by_message(ValueError, DataError, CheckpointError):
            if progress and on_data is None:  # otherwise, a line about the data is printed first
                view.start(starting)
            source = prepare_run_data(config)
            if on_data is not None:
                on_data(source)
            check_checkpoints(config, source)
        if progress:
            view.start(starting)
        try:
            timeouts = {"timeout_s": timeout_s, "group_timeout_s": group_timeout_s}
            shown = progress and view
            record = launch(train_worker, config, world_size=world_size, device=device, progress=shown, **timeouts)[0]
        finally:
            remove_unfinished(config)
    if watched:
        view.summarize(record)
    return record


def _live_view() -> ProgressBar:
    from fsdp_helpers.training.live_view import LiveView  # loads matplotlib, which other runs don't need

    return LiveView()


def _check_ranks(config: TrainConfig, world_size: int, device: str) -> str:
    """Return the device ("cpu" or "cuda") after checking that `config` can run on it with `world_size` ranks."""
    config.check_world_size(world_size)
    device = choose_device(device, world_size)
    config.check_device(device)
    return device


def train_as_rank_of_torchrun(
    config: TrainConfig,
    *,
    world_size: int | None = None,
    device: str = "auto",
    group_timeout_s: float | None = None,
    on_data: Callable[[str], None] | None = None,
) -> RunRecord | None:
    """Train as one rank; the first rank of each machine prepares the data, and rank 0 returns the record.

    If a run with a `checkpoint_dir` receives SIGTERM, it saves after the current step, and no rank returns a record.
    Raises ValueError, DataError or CheckpointError as `train` does, and also for an environment that's incomplete or
    inconsistent; RankError for a worker that fails or times out waiting for other ranks.
    """
    torchrun = read_torchrun_rank()
    if world_size not in (None, torchrun.world_size):
        raise ValueError(
            f"--world-size is {world_size}, but torchrun started {torchrun.world_size} ranks; leave it out"
        )
    config.check_world_size(torchrun.world_size)
    require_seconds(timeout=group_timeout_s)
    if device == "cpu" or torchrun.local_world_size == torchrun.world_size:
        device = choose_device(device, torchrun.local_world_size)
    else:
        store = next(dist.rendezvous("env://"))[0]  # kept while this rank trains, since rank 0 may be its server
        device = _agree_on_device(device, torchrun, store)
    config.check_device(device)
    if device == "cpu":
        hide_gpus()
    bar = ProgressBar()
    if torchrun.rank == 0:
        send_reports_to(bar.update)
    with (
        process_group(torchrun.rank, torchrun.world_size, device=device, timeout_s=group_timeout_s),
        _failures_of_rank(torchrun),
        silent_ranks_named(group_timeout_s),
    ):
        problem = _prepare_together(torchrun, config, on_data)
        record = None if problem else _train_until_stopped(torchrun, config)
    if problem:
        raise problem
    bar.close()
    return record if torchrun.rank == 0 else None


def _agree_on_device(device: str, torchrun: TorchrunRank, store: dist.Store) -> str:
    """Return "cuda" if every host has a GPU for each of its ranks, or "cpu" if no host has any and `device` is "auto".

    The hosts tell each other over a group on the CPU. Raises the same ValueError on every rank otherwise.
    """
    gpus = find_gpus(torchrun.local_world_size)
    own = (socket.gethostname(), 0 if gpus.problem else gpus.count, torchrun.local_world_size)
    group = {"store": dist.PrefixStore("devices", store), "rank": torchrun.rank, "world_size": torchrun.world_size}
    dist.init_process_group("gloo", **group)
    hosts = sorted(set(gather_over_ranks(own)))
    dist.destroy_process_group()
    lacking = [f"{name} (usable GPUs: {count}, ranks: {ranks})" for name, count, ranks in hosts if count < ranks]
    if not lacking:
        return "cuda"
    if device == "auto" and not any(count for _, count, _ in hosts):
        return "cpu"
    raise ValueError(f"fewer GPUs than ranks on {', '.join(lacking)}; fix that, or use --device cpu")


@contextmanager
def _failures_of_rank(torchrun: TorchrunRank) -> Iterator[None]:
    """Within the block, turn any error into a RankError; only errors other than bad input get this far."""
    try:
        yield
    except Exception as error:
        raise RankError(torchrun.rank, torchrun.world_size, *describe_error(error)) from error


def _prepare_together(
    torchrun: TorchrunRank, config: TrainConfig, on_data: Callable[[str], None] | None
) -> Exception | None:
    """Prepare data on every machine, and check checkpoints on rank 0; every rank returns the first problem, or None."""
    problem = None
    try:
        if torchrun.local_rank == 0:
            source = prepare_run_data(config)
            if torchrun.rank == 0 and on_data is not None:
                on_data(source)
        if torchrun.rank == 0:
            check_checkpoints(config, source)
    except (ValueError, DataError, CheckpointError) as error:
        problem = error
    return next(filter(None, gather_over_ranks(problem)), None)


def _train_until_stopped(torchrun: TorchrunRank, config: TrainConfig) -> RunRecord | None:
    """Train and return the record. If SIGTERM ends the run early, rank 0 reports that, and the result is None."""
    try:
        with catching_sigterm() if config.checkpoint_dir else nullcontext():
            return train_worker(torchrun.rank, torchrun.world_size, config)
    except Stopped as stop:
        if torchrun.rank == 0:
            print(f"fsdp_helpers: {stop}", file=sys.stderr, flush=True)
        return None


def prepare_run_data(config: TrainConfig) -> str:
    """Make sure that workers will find their data; return its source, "mnist" or "digits".

    Raises ValueError if there are too few images.
    """
    _check_data_size(config, "mnist")  # against the larger source, so impossible runs are rejected before a download
    source = prepare_data(config.data_dir)
    _check_data_size(config, source)
    return source


def _check_data_size(config: TrainConfig, source: str) -> None:
    config.check_data_size(source, num_train_images(source), num_test_images(source))
