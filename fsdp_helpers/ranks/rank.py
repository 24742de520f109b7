"""The process of one rank, from its start to its exit, no matter what it runs."""

import ctypes
import glob
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from fsdp_helpers.gpus import hide_gpus
from fsdp_helpers.ranks import server
from fsdp_helpers.ranks.errors import Answer, Failure, describe_error
from fsdp_helpers.ranks.stacks import write_on_request

# send("answer", an Answer), or send("note", something to tell the parent in the meantime)
Send = Callable[[str, Any], None]


def run_rank(
    rank: int,
    body: Callable,
    world_size: int,
    device: str,
    folder: str,
    environment: dict[str, str],
    ends: Sequence[Sequence[Connection]],
) -> None:
    """Prepare this process, run `body(rank, world_size, group, send, link)`, and exit; `start_processes` calls this.

    `group` has the arguments for `process_group`. `environment` comes from the parent: the server's may be outdated.
    `ends` has each rank's end of its message link and of one or two output pipes. If the body raises
    anything, SystemExit included, the parent is told immediately; if it returns an answer, that's sent at the very end.
    """
    link, *outputs = ends[rank]
    server.is_rank = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    server.lead_family(multiprocessing.parent_process().join, glob.escape(folder))
    # What Python prints goes to the parent's pipes, line by line, and so does the output of C libraries and programs.
    for name, number, output in zip(("stdout", "stderr"), (1, 2), (outputs[0], outputs[-1]), strict=True):
        os.dup2(output.fileno(), number)
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False))
    # An edited file can have the same size and the same second of change as its cached module. So look for caches in
    # an empty folder.
    sys.pycache_prefix, sys.dont_write_bytecode = folder, True
    os.environ.clear()
    os.environ.update(environment)
    if device == "cpu":
        hide_gpus()  # before the worker's module is imported, which may look for GPUs
    # The variables that torchrun sets, for libraries that read them; and traffic stays on this machine.
    own, everyone = str(rank), str(world_size)
    os.environ.update(RANK=own, LOCAL_RANK=own, WORLD_SIZE=everyone, LOCAL_WORLD_SIZE=everyone)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    multiprocessing.set_start_method("fork", force=True)  # so that a DataLoader's workers know what a cell defines
    write_on_request(folder, rank)

    def send(kind: str, content: Any) -> None:
        try:
            link.send_bytes(pickle.dumps((kind, content)))  # `link.send` would share tensors, not copy them
        except OSError:  # the parent has ended: the thread that watches it removes the folder, and ends this process
            threading.Event().wait()

    group = {"device": device, "init_method": f"file://{folder}/meeting-point", "launched": True}
    answer = None
    try:
        answer = body(rank, world_size, group, send, link)
    except BaseException as error:
        send("answer", Answer(None, failure=Failure(*describe_error(error))))
    # Do what Python does at exit, such as waiting for threads, but skip the cleanup of its own objects: gloo's threads
    # outlive their group, and if one releases a tensor while Python shuts down, the process aborts.
    server.end_own_children()
    threading._shutdown()  # as multiprocessing does; it first tells thread pools to end, including torch.compile's
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # removes its temporary files
    flush()
    if answer is not None:
        send("answer", answer)
    os._exit(0)


def flush() -> None:
    """Flush the output of Python and C libraries."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)
