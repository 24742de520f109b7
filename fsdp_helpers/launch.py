"""Start one process a rank, show their progress, bring their results back; leave nothing behind.

Workers are importable functions `worker(rank, world_size, *args)`. Their processes are forked from a server that has
torch loaded already (`forkserver`), so a launch takes a fraction of a second after the first. The server holds
third-party modules only: an edit to `fsdp_helpers` or to your own module counts from the next launch on.
"""

import faulthandler
import inspect
import io
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing

from fsdp_helpers import progress as progress_reports
from fsdp_helpers.ranks import choose_device, process_group

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
        job = _Job(payload=payload, world_size=world_size, device=device, folder=folder)
        ranks: list[_Rank] = []
        bar = progress_reports.ProgressBar()
        try:
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


@dataclass(frozen=True)
class _Job:
    """What every rank of one launch is told."""

    payload: bytes  # the pickled worker and its arguments
    world_size: int
    device: str
    folder: str

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}.txt")


@dataclass(frozen=True)
class _Failure:
    rank: int
    when_s: float
    summary: str
    details: str = ""


@dataclass
class _Rank:
    """The parent's view of one rank."""

    rank: int
    process: Any
    connection: multiprocessing.connection.Connection
    result: bytes | None = None
    failure: _Failure | None = None

    @property
    def ended(self) -> bool:
        return self.connection.closed


# ---------------------------------------------------------------- the parent


def _start_rank(rank: int, job: _Job) -> _Rank:
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _start_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(rank, job, sender), name=f"rank {rank}")
    process.start()
    sender.close()  # the rank holds the only copy now: when it ends, the receiver sees the end of the stream
    return _Rank(rank, process, receiver)


def _start_server() -> None:
    """Start the server, if it is not running, with interrupts held back for good.

    Jupyter interrupts a kernel's whole process group, and the server would die of it while it still loads torch.
    """
    multiprocessing.resource_tracker.ensure_running()  # first: starting it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(ranks: list[_Rank], job: _Job, bar: progress_reports.ProgressBar | None, timeout_s: float | None) -> list:
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


def _death(rank: _Rank) -> _Failure:
    """A rank that ended without a word is the cause of whatever the others report."""
    rank.process.join(END_S)
    code = rank.process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (often the system, out of memory)" if name == "SIGKILL" else ""
        return _Failure(rank.rank, float("-inf"), f"the process was ended by {name}{hint}")
    return _Failure(rank.rank, float("-inf"), f"the process left with exit status {code} before its worker returned")


def _where_ranks_stand(waiting: list[_Rank], job: _Job, timeout_s: float) -> str:
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
        if not path.startswith(libraries) and not path.startswith(os.path.dirname(__file__) + "/launch"):
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


# ---------------------------------------------------------------- the rank


def _rank_main(rank: int, job: _Job, sender: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle; it stops the ranks
    if not os.path.isdir(job.folder):
        return  # the launch was interrupted before this process began
    _end_with_parent(job.folder)
    _import_from_source(job.folder)
    send = _Sender(sender)
    sys.stdout, sys.stderr = _LineSender(send, "stdout"), _LineSender(send, "stderr")
    if rank == 0:
        progress_reports.send_reports_to(lambda *report: send("progress", report))
    with open(job.stack_file(rank), "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            with _failures_sent(send, rank):
                _set_rank_variables(rank, job.world_size)
                worker, args = pickle.loads(job.payload)
                meeting_point = f"file://{job.folder}/meeting-point"
                with (
                    process_group(rank, job.world_size, device=job.device, init_method=meeting_point),
                    _failures_sent(send, rank),  # at once: when the group ends, the other ranks fail too
                ):
                    result = worker(rank, job.world_size, *args)
                send("result", pickle.dumps(result))
        finally:
            sys.stdout.send_rest()
            sys.stderr.send_rest()
            faulthandler.unregister(signal.SIGUSR1)


def _end_with_parent(folder: str) -> None:
    """If the parent is killed (a kernel restart), end at once and remove the private folder."""
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([parent])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _import_from_source(folder: str) -> None:
    """Python takes a cached module for current if its source has the same size and second of change.

    An edit can have both; so this process looks for caches in a folder where there are none.
    """
    sys.pycache_prefix = folder
    sys.dont_write_bytecode = True


def _set_rank_variables(rank: int, world_size: int) -> None:
    """The variables that torchrun sets, for libraries that read them; and traffic kept on this machine."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


@contextmanager
def _failures_sent(send: "_Sender", rank: int) -> Iterator[None]:
    """Tell the parent of every end but a normal one, sys.exit() included; it heeds the first message of a rank."""
    try:
        yield
    except BaseException as error:
        summary = traceback.format_exception_only(error)[-1].strip()
        worker_frames = error.__traceback__
        while worker_frames and worker_frames.tb_frame.f_code.co_filename == __file__:
            worker_frames = worker_frames.tb_next
        details = "".join(traceback.format_exception(type(error), error, worker_frames)).rstrip()
        send("failure", _Failure(rank, time.monotonic(), summary, details))
        raise SystemExit(1) from error


class _Sender:
    """Messages to the parent, whole ones, from any thread."""

    def __init__(self, connection: multiprocessing.connection.Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, kind: str, content: Any) -> None:
        with self._lock:
            self._connection.send((kind, content))


class _LineSender(io.TextIOBase):
    """A stream that sends whole lines to the parent, so that the ranks' lines never mix."""

    def __init__(self, send: _Sender, stream: str) -> None:
        self._send, self._stream, self._line = send, stream, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._send("line", (self._stream, line))
        return len(text)

    def flush(self) -> None:
        """Nothing to do: a line travels when it is complete."""

    def send_rest(self) -> None:
        if self._line:
            self.write("\n")
