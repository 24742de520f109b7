"""The process of one rank: everything between its first moment and its worker, and after it."""

import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_helpers.ranks import progress
from fsdp_helpers.ranks.group import process_group


@dataclass(frozen=True)
class Job:
    """What every rank of one launch is told."""

    payload: bytes  # the pickled worker and its arguments
    world_size: int
    device: str
    folder: str

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}.txt")


@dataclass(frozen=True)
class Failure:
    rank: int
    when_s: float
    summary: str
    details: str = ""


def run_rank(rank: int, job: Job, sender: multiprocessing.connection.Connection) -> None:
    """Join the group, run the worker, and send the parent its result or its failure: the target of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle; it stops the ranks
    if not os.path.isdir(job.folder):
        return  # the launch was interrupted before this process began
    _end_with_parent(job.folder)
    _import_from_source(job.folder)
    send = _Sender(sender)
    sys.stdout, sys.stderr = _LineSender(send, "stdout"), _LineSender(send, "stderr")
    if rank == 0:
        progress.send_reports_to(lambda *report: send("progress", report))
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
        send("failure", Failure(rank, time.monotonic(), *describe_error(error)))
        raise SystemExit(1) from error


def describe_error(error: BaseException) -> tuple[str, str]:
    """The last line of a traceback, and all of it from the worker on."""
    worker_frames = error.__traceback__
    while worker_frames and worker_frames.tb_frame.f_code.co_filename == __file__:
        worker_frames = worker_frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, worker_frames)).rstrip()
    return traceback.format_exception_only(error)[-1].strip(), details


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
