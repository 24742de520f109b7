"""The process of one rank: everything between its first moment and its worker, and after it."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from fsdp_helpers.ranks.gpus import hide_gpus
from fsdp_helpers.ranks.group import process_group
from fsdp_helpers.ranks.keeper import start_keeper
from fsdp_helpers.ranks.launching.job import Job
from fsdp_helpers.ranks.launching.pickling import pickle_result
from fsdp_helpers.ranks.launching.stacks import written_on_request
from fsdp_helpers.ranks.launching.start import loading_worker
from fsdp_helpers.ranks.launching.streams import LineSender
from fsdp_helpers.ranks.progress import send_reports_to
from fsdp_helpers.ranks.roll_call import silent_ranks_named

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Failure:
    """The end of a rank that did not end well."""

    rank: int
    when_s: float
    summary: str
    details: str = ""
    aborted: bool = False  # by itself, SIGABRT: so a library ends a process, NCCL's watchdog for one


def run_rank(rank: int, job: Job, sender: multiprocessing.connection.Connection) -> None:
    """Join the group, run the worker, and send the parent its result or its failure; `begin_rank` runs this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle; it stops the ranks
    if not os.path.isdir(job.folder):
        return  # the launch was interrupted before this process began
    start_keeper(job.folder)
    _import_from_source(job.folder)
    send = _Sender(sender)
    streams = [LineSender(lambda line, name=name: send("line", (name, line))) for name in STREAMS]  # type: ignore[misc]
    sys.stdout, sys.stderr = streams
    if rank == 0 or job.all_report:
        send_reports_to(lambda *report: send("progress", report))
    status = 1
    try:
        with written_on_request(job.stack_file(rank)), _failures_sent(send, rank):
            _work(rank, job, send)
        status = 0
    finally:
        _leave(status, streams)


def _work(rank: int, job: Job, send: "_Sender") -> None:
    _take_environment(job.environment)
    if job.device == "cpu":
        hide_gpus()  # before the worker's module is imported, which may look
    _set_rank_variables(rank, job.world_size)
    with loading_worker():
        worker, args = pickle.loads(job.payload)
    with (
        process_group(
            rank,
            job.world_size,
            device=job.device,
            init_method=job.meeting_point,
            timeout_s=job.group_timeout_s,
            launched=True,
        ),
        _failures_sent(send, rank),  # at once: when the group ends, the other ranks fail too
        silent_ranks_named(job.group_timeout_s),
    ):
        send("in group", None)
        result = worker(rank, job.world_size, *args)
    send("result", pickle_result(worker, result))


def _leave(status: int, streams: list[LineSender]) -> NoReturn:
    """Exit without Python's clean-up, but with multiprocessing's, and after waiting for non-daemon threads.

    gloo's threads outlive their group, and one that releases a tensor while Python is shutting down aborts the process.
    """
    for child in multiprocessing.active_children():
        child.kill()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # removes its temporary files
    for stream in streams:
        stream.send_rest()
    os._exit(status)


def _import_from_source(folder: str) -> None:
    """Keep Python from using a cached module whose source has the same size and second of change.

    An edited file can have both, so this process looks for caches in a folder without any.
    """
    sys.pycache_prefix = folder
    sys.dont_write_bytecode = True


def _take_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _set_rank_variables(rank: int, world_size: int) -> None:
    """Set the variables that torchrun sets, for libraries that read them; keep traffic on this machine."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


@contextmanager
def _failures_sent(send: "_Sender", rank: int) -> Iterator[None]:
    """Tell the parent about every end except a normal one, sys.exit() included; it heeds a rank's first message."""
    try:
        yield
    except BaseException as error:
        send("failure", Failure(rank, time.monotonic(), *describe_error(error)))
        raise SystemExit(1) from error


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the last line of a traceback, and all of it from the worker on."""
    worker_frames = error.__traceback__
    while worker_frames and worker_frames.tb_frame.f_code.co_filename == __file__:
        worker_frames = worker_frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, worker_frames)).rstrip()
    return traceback.format_exception_only(error)[-1].strip(), details


class _Sender:
    """A sender of whole messages to the parent, from any thread."""

    def __init__(self, connection: multiprocessing.connection.Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, kind: str, content: Any) -> None:
        with self._lock:
            self._connection.send((kind, content))
