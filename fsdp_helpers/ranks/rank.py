"""The process of one rank: everything between its first moment and its end, whatever it is there to run."""

import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from fsdp_helpers.ranks.errors import describe_error
from fsdp_helpers.ranks.gpus import hide_gpus
from fsdp_helpers.ranks.orphans import adopt_orphans, end_own_children
from fsdp_helpers.ranks.setup import Setup
from fsdp_helpers.ranks.stacks import written_on_request

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Failure:
    """The end of a worker, or of a cell, that did not end well."""

    when_s: float
    summary: str  # the last line of the traceback
    details: str = ""
    aborted: bool = False  # by itself, SIGABRT: so a library ends a process, NCCL's watchdog for one


class Sender:
    """A sender of whole messages to the parent, from any thread."""

    def __init__(self, link: multiprocessing.connection.Connection) -> None:
        self._link, self._lock = link, threading.Lock()

    def __call__(self, kind: str, content: Any) -> None:
        with self._lock:
            self._link.send_bytes(pickle.dumps((kind, content)))  # `send` would share tensors, not copy them


def run_rank(rank: int, setup: Setup, links: list, outputs: list) -> None:
    """Prepare this process, run the body of the group, and leave; `begin_rank` calls this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    if hasattr(os, "setsid"):
        os.setsid()
    if not os.path.isdir(setup.folder):
        return  # the start was interrupted before this process began
    adopt_orphans()
    _end_with_parent(setup.folder)
    link = links[rank]
    write_into(outputs[rank])
    for connection in (*links[:rank], *links[rank + 1 :], *(end for ends in outputs for end in ends)):
        connection.close()
    _import_from_source(setup.folder)
    take_environment(setup.environment)
    if setup.device == "cpu":
        hide_gpus()  # before the worker's module is imported, which may look
    _set_rank_variables(rank, setup.world_size)
    if sys.platform == "linux":  # so that the workers of a DataLoader know what a cell defines
        multiprocessing.set_start_method("fork", force=True)
    send, status = Sender(link), 1
    try:
        with written_on_request(setup.stack_file(rank)), failures_sent(send):
            pickle.loads(setup.body)(rank, setup, send, link)
        status = 0
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """Exit without Python's clean-up, but with multiprocessing's, and after waiting for non-daemon threads.

    gloo's threads outlive their group, and one that releases a tensor while Python is shutting down aborts the process.
    """
    end_own_children()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # removes its temporary files
    flush()
    os._exit(status)


def write_into(outputs: tuple) -> None:
    """Send what this process writes into the parent's pipes: Python line by line, C libraries, programs it starts."""
    for name, number, output in zip(STREAMS, (1, 2), (outputs[0], outputs[-1]), strict=True):
        os.dup2(output.fileno(), number)
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, stream)


def flush() -> None:
    """Send what Python and C libraries have not written yet."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)


def _end_with_parent(folder: str) -> None:
    """End this rank, and all that it has started, when its parent ends in any way: a kernel is killed, or restarted."""
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([parent])
        shutil.rmtree(folder, ignore_errors=True)
        end_own_children()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _import_from_source(folder: str) -> None:
    """Keep Python from using a cached module whose source has the same size and second of change.

    An edited file can have both, so this process looks for caches in a folder without any.
    """
    sys.pycache_prefix = folder
    sys.dont_write_bytecode = True


def take_environment(changes: dict[str, str | None]) -> None:
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
def failures_sent(send: Sender) -> Iterator[None]:
    """Tell the parent about every end except a normal one, sys.exit() included."""
    try:
        yield
    except BaseException as error:
        send("failure", Failure(time.monotonic(), *describe_error(error)))
        raise SystemExit(1) from error
