"""Start one process per rank, show progress, return the results, and leave nothing behind.

A worker is sent to its processes by name, with its arguments pickled; an error names the value that can't be pickled.
"""

import inspect
import io
import os
import pickle
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fsdp_helpers.config import require_positive_int, require_seconds
from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import follow_edits, shown_by_message
from fsdp_helpers.progress import ProgressBar, Report, print_above_bar, send_reports_to
from fsdp_helpers.quantities import format_count
from fsdp_helpers.ranks.errors import Answer, Interrupted, RankError, RankTimeout
from fsdp_helpers.ranks.group import process_group, silent_ranks_named
from fsdp_helpers.ranks.processes import Processes
from fsdp_helpers.ranks.rank import Send
from fsdp_helpers.ranks.server import check_not_a_rank

__all__ = ["RankError", "RankTimeout", "launch"]

A_MODULE = "a module (a .py file, or a cell that begins with '%%writefile my_worker.py')"


def launch(
    worker: Callable,
    *args: Any,
    world_size: int,
    device: str = "auto",
    timeout_s: float | None = None,
    stall_s: float | None = None,
    group_timeout_s: float | None = None,
    progress: bool | ProgressBar = True,
) -> list:
    """Run `worker(rank, world_size, *args)` in `world_size` processes and return their results in rank order.

    `worker` is an importable function. It runs in a process group (gloo on the CPU, nccl with one device per rank on
    CUDA) whose ranks meet through a file in a private folder, so they don't use a port. What it prints is shown here
    line by line; with several ranks, each line names its rank. A rank that waits for the others in a collective gives
    up after `group_timeout_s` seconds (half an hour if it's None), and its error names the ranks that didn't answer. On
    CUDA, that needs PyTorch 2.15, and any such limit makes ranks wait for each collective, so that communication no
    longer overlaps with computation. `progress` may be a `ProgressBar` or a `LiveView` that's already on screen.

    Raises ValueError before anything starts if the worker can't be imported, an argument can't be sent, or there are
    zero ranks or more ranks than CUDA devices. Raises RankError when a rank fails; RankTimeout after `timeout_s`
    seconds, or once all ranks have joined and none of them has computed or reported anything for `stall_s` seconds;
    Interrupted, which is a KeyboardInterrupt, after ^C or the stop button; and RuntimeError in a script without a main
    guard. No process outlives the call, not even one that a worker started.
    """
    check_not_a_rank()
    follow_edits()
    with shown_by_message(ValueError):
        check_worker(worker)
        require_positive_int("world_size", world_size)
        require_seconds(timeout_s=timeout_s, stall_s=stall_s, timeout=group_timeout_s)
        device = choose_device(device, world_size)
        body = partial(run_worker, pickle_job(worker, args), group_timeout_s)
    bar = ProgressBar() if isinstance(progress, bool) else progress
    output = LaunchOutput(names=world_size > 1)

    def show(report: Report | None, rank: int) -> None:
        if report is None:  # the rank has joined
            bar.running()
        elif progress:
            bar.update(report, rank)

    try:
        if progress:
            bar.start(f"{worker.__name__}, {format_count(world_size, 'rank')} on {device}")
        with Processes(body, world_size, device, output.add, on_note=show, streams=2, stall_s=stall_s) as ranks:
            return ranks.answers_of_all(timeout_s)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; all ranks are stopped") from None
    finally:
        bar.close()
        output.finish()


def run_worker(
    job: bytes, timeout_s: float | None, rank: int, world_size: int, group: dict, send: Send, _: Connection
) -> Answer:
    """Run as one rank of a launch: join the group, run the worker, and return its result."""
    send_reports_to(lambda report: send("note", report))
    name, pickled = pickle.loads(job)
    worker, args = pkgutil.resolve_name(name), list(map(pickle.loads, pickled))
    with process_group(rank, world_size, **group, timeout_s=timeout_s), silent_ranks_named(timeout_s):
        send("note", None)  # all ranks have joined
        result = worker(rank, world_size, *args)
    dumps(result, f"the result of {worker.__name__!r}")  # so that an error names it
    return Answer(0, result)


class LaunchOutput:
    """Prints launched ranks' output, one complete line at a time, each with its rank's number if `names` is true."""

    def __init__(self, names: bool) -> None:
        self._names = names
        self._unfinished: dict[tuple[int, int], bytes] = defaultdict(bytes)  # a line's beginning, by rank and stream

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Receive output that a rank has printed to stream 0 (standard output) or 1 (standard error)."""
        *lines, self._unfinished[rank, stream] = (self._unfinished[rank, stream] + data).split(b"\n")
        for line in lines:
            name, text = f"[rank {rank}] " if self._names else "", line.decode("utf-8", "replace")
            print_above_bar(name + text if text else name.rstrip(), (sys.stdout, sys.stderr)[stream])

    def finish(self) -> None:
        """Print the unfinished lines."""
        for rank, stream in [of for of, line in self._unfinished.items() if line]:
            self.add(rank, stream, b"\n")


# ---------------------------------------------------------------- sending the worker and its arguments


def check_worker(worker: Callable) -> None:
    """Raise ValueError for a worker that another process can't import."""
    if not inspect.isfunction(worker):
        raise ValueError(f"a worker must be a function, but this is {type(worker).__name__!r}: {worker!r}")
    if "<" in worker.__qualname__:
        raise ValueError(
            f"{worker.__qualname__!r} is a lambda or is defined inside another function, so a new process can't import "
            f"it by name. Define it with 'def' at the top level of {A_MODULE}"
        )
    _check_not_in_a_cell(worker)


def _check_not_in_a_cell(value: Any) -> None:
    """Raise ValueError for a function or class that's defined in a cell, or typed at a prompt."""
    if value.__module__ == "__main__" and not _can_import_main():
        raise ValueError(
            f"{value.__qualname__!r} is defined in a notebook cell or an interactive session. A new process starts empty "
            f"and imports it by name, and it can't import a cell. Put it into {A_MODULE}, and import it from there"
        )


def pickle_job(worker: Callable, args: tuple) -> bytes:
    """Return the worker's name and its arguments as bytes. Raises ValueError for an argument that can't be sent.

    The worker is sent by name because its module may have been edited since; a rank runs the file's current code.
    """
    names = [repr(name) for name in inspect.signature(worker).parameters][2:]
    names += [f"number {position + 1}" for position in range(len(names), len(args))]
    pickled = [
        dumps(value, f"argument {name} of {worker.__name__!r}") for name, value in zip(names, args, strict=False)
    ]
    return pickle.dumps((f"{worker.__module__}:{worker.__qualname__}", pickled))


def dumps(value: Any, name: str) -> bytes:
    """Return `value` pickled. Raises ValueError if it can't be sent; the message calls it `name` and says why."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception as error:
        raise ValueError(
            f"{name} is of type {type(value).__module__}.{type(value).__qualname__} and can't be sent to another "
            f"process: {error}. Pass plain values instead (numbers, text, lists, CPU tensors, a dataclass from a module), "
            "or what the rank needs to create the value, such as a file's path."
        ) from None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that refuses functions and classes that are defined in a cell."""

    def reducer_override(self, value: Any) -> Any:
        if inspect.isclass(value) or inspect.isfunction(value):
            _check_not_in_a_cell(value)
        return NotImplemented


def _can_import_main() -> bool:
    """Return True if a new process can import this program's main module: a script, or a module run with -m."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return not main.__spec__.name.endswith("__main__")  # a package's or a folder's is never imported
    return os.path.exists(getattr(main, "__file__", None) or "")
