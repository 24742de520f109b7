"""Start one process a rank, show their progress, bring their results back; leave nothing behind.

Workers are importable functions `worker(rank, world_size, *args)`. Their processes are forked from a server that has
torch loaded already (`forkserver`), so a launch takes a fraction of a second after the first. The server holds
third-party modules only: an edit to `fsdp_helpers` or to your own module counts from the next launch on.
"""

import inspect
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import re
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing

from fsdp_helpers.ranks import process as rank_process
from fsdp_helpers.ranks import progress as progress_reports
from fsdp_helpers.ranks.allocator import malloc_tunables
from fsdp_helpers.ranks.group import choose_device
from fsdp_helpers.ranks.process import Failure, Job, run_rank

PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.profiler",
    "torch.utils.data",
    "torch._dynamo",
    "torchvision.datasets",
    "sklearn.datasets",
    "filelock",
    "tqdm",
]
GRACE_S = 0.5  # after a failure: wait this long for the failure that caused it
END_S = 3.0  # after SIGTERM: wait this long before SIGKILL


class RankError(RuntimeError):
    """A rank failed; the message holds its number and its original traceback."""

    def __init__(self, rank: int, world_size: int, summary: str, details: str = "") -> None:
        self.rank, self.summary, self.details = rank, summary, details
        super().__init__(f"rank {rank} of {world_size} failed: {summary}" + (f"\n\n{details}" if details else ""))


class RankTimeout(TimeoutError):
    """Ranks were still running when the time was up; the message says where each one stood."""


def launch(
    worker: Callable,
    *args: Any,
    world_size: int,
    device: str = "auto",
    timeout_s: float | None = None,
    progress: bool = True,
) -> list:
    """Run `worker(rank, world_size, *args)` in `world_size` processes and return their results in rank order.

    Each worker finds itself in a process group: gloo on the CPU, nccl with one device a rank on CUDA. The ranks meet
    through a file in a private folder, so no port is taken that another program could want. What a worker
    prints arrives here line by line.

    Raises ValueError before anything starts (a worker that cannot be imported, zero ranks, more ranks than CUDA
    devices), RankError when a rank fails, RankTimeout after `timeout_s` seconds. No process outlives the call.
    """
    check_worker(worker)
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it must be a whole number, 1 or more")
    device = choose_device(device, world_size)
    payload = pickle.dumps((worker, args))
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
        job = Job(payload=payload, world_size=world_size, device=device, folder=folder)
        ranks: list[_Rank] = []
        bar = progress_reports.ProgressBar()
        try:
            _start_server()
            for rank in range(world_size):
                ranks.append(_start_rank(rank, job))
            return _collect(ranks, job, bar if progress else None, timeout_s)
        finally:
            bar.close()
            _stop(ranks)


def check_worker(worker: Callable) -> None:
    """Raise ValueError for a worker that another process cannot import."""
    if not inspect.isfunction(worker):
        raise ValueError(f"a worker must be a function, this is {type(worker).__name__!r}: {worker!r}")
    if worker.__module__ == "__main__" and not os.path.exists(worker.__code__.co_filename):
        raise ValueError(
            f"{worker.__name__!r} is defined in a notebook cell or an interactive session. A new process starts empty "
            "and imports its worker by name, and it cannot import a cell. Two ways out: put the function into a module "
            f"(a .py file), or begin its cell with '%%writefile my_worker.py' and then 'from my_worker import "
            f"{worker.__name__}'."
        )
    if "<" in worker.__qualname__:
        raise ValueError(
            f"{worker.__qualname__!r} is a lambda or is defined inside another function, so a new process cannot "
            "import it by name. Define it with 'def' at the top level of a module."
        )


@dataclass
class _Rank:
    """The parent's view of one rank."""

    rank: int
    process: Any
    connection: multiprocessing.connection.Connection
    result: bytes | None = None
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return self.connection.closed


def _start_rank(rank: int, job: Job) -> _Rank:
    context = torch.multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_rank, args=(rank, job, sender), name=f"rank {rank}")
    process.start()
    sender.close()  # the rank holds the only copy now: when it ends, the receiver sees the end of the stream
    return _Rank(rank, process, receiver)


def _start_server() -> None:
    """Start the server, if it is not running, with interrupts held back for good.

    Jupyter interrupts a kernel's whole process group, and the server would die of it while it still loads torch.
    """
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    multiprocessing.resource_tracker.ensure_running()  # first: starting it lets interrupts through again
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with malloc_tunables():
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)


def _collect(ranks: list[_Rank], job: Job, bar: progress_reports.ProgressBar | None, timeout_s: float | None) -> list:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while waiting := [rank for rank in ranks if not rank.ended]:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = multiprocessing.connection.wait([rank.connection for rank in waiting], left_s)
        failed_before = any(rank.failure for rank in ranks)
        for rank in waiting:
            if rank.connection in ready:
                _receive(rank, bar)
        if not failed_before and any(rank.failure for rank in ranks):
            deadline_s = time.monotonic() + GRACE_S
        elif deadline_s is not None and time.monotonic() >= deadline_s:  # also where a rank never stops sending
            if failed_before:
                break
            if running := [rank for rank in waiting if not rank.ended]:
                raise RankTimeout(_where_ranks_stand(running, job, timeout_s))
    failures = [rank.failure for rank in ranks if rank.failure]
    if failures:
        first = min(failures, key=lambda failure: failure.when_s)
        raise RankError(first.rank, job.world_size, first.summary, first.details)
    return [pickle.loads(rank.result) for rank in ranks]


def _receive(rank: _Rank, bar: progress_reports.ProgressBar | None) -> None:
    try:
        kind, content = rank.connection.recv()
    except (EOFError, ConnectionResetError):
        rank.connection.close()
        if rank.result is None and rank.failure is None:
            rank.failure = _death(rank)
        return
    if kind == "result":
        rank.result = content
    elif kind == "failure":
        rank.failure = rank.failure or content
    elif kind == "line":
        stream, text = content
        (bar or progress_reports.ProgressBar()).print(text, getattr(sys, stream))
    elif bar is not None:
        bar.update(*content)


def _death(rank: _Rank) -> Failure:
    """A rank that ended without a word is the cause of whatever the others report."""
    rank.process.join(END_S)
    code = rank.process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
        return Failure(rank.rank, float("-inf"), f"the process was ended by {name}{hint}")
    return Failure(rank.rank, float("-inf"), f"the process left with exit status {code} before its worker returned")


def _where_ranks_stand(waiting: list[_Rank], job: Job, timeout_s: float) -> str:
    for rank in waiting:
        if rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    lines = [f"rank {rank.rank} {_describe_stack(job.stack_file(rank.rank))}" for rank in waiting]
    done = job.world_size - len(waiting)
    return f"after {timeout_s} s, {len(waiting)} of {job.world_size} ranks had not finished ({done} had)\n" + "\n".join(
        lines
    )


def _describe_stack(stack_file: Path) -> str:
    """The innermost line outside the libraries, and the library function it was waiting in."""
    text = stack_file.read_text() if stack_file.exists() else ""
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
    called = None
    for path, line, function in frames:  # innermost first
        if not path.startswith(libraries) and not path.startswith(rank_process.__file__):
            where = f"{os.path.basename(path)} line {line}, in {function}"
            return f"was waiting in {called}(), called from {where}" if called else f"was at {where}"
        if function != "wrapper":
            called = function
    return "was still starting" if not called else f"was waiting in {called}()"


def _stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive() and rank.result is None:
            rank.process.terminate()
    for rank in ranks:
        rank.process.join(END_S)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.connection.close()
        rank.process.close()
