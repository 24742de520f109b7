"""Inside a rank that stays: it runs one cell after another in a module of its own, and answers with what came out.

What a cell prints goes through a pipe, as bytes, so that a C library or a program that the cell starts is heard too.
"""

import ast
import builtins
import importlib.machinery
import linecache
import multiprocessing
import multiprocessing.connection
import os
import pickle
import pprint
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_helpers.ranks.group import process_group, rank_device

INTERRUPT = getattr(signal, "SIGUSR2", None)  # the parent's request to end a cell; SIGINT is for the whole group
WIDTH = 110  # of a value that is shown over several lines
ADDRESS = re.compile(r"( object)? at 0x[0-9a-fA-F]+")
CELLS = "<cells>"  # the file of the module in which all cells run


@dataclass(frozen=True)
class Setup:
    """What all ranks of a group start with."""

    world_size: int
    device: str
    timeout_s: float
    folder: str
    environment: dict[str, str | None]  # what the parent changed (None: removed) since its ranks are forked

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}.txt")

    @property
    def meeting_point(self) -> str:
        return "file:///" + Path(self.folder, "meeting-point").as_posix().lstrip("/")


@dataclass(frozen=True)
class Failure:
    """An exception that a cell did not catch."""

    when_s: float
    summary: str  # the traceback's last line
    cell_lines: str  # the traceback without the libraries' frames
    details: str  # all of it


@dataclass(frozen=True)
class Answer:
    """What one rank says at the end of a cell."""

    value: str | None = None  # of the last line, as it is shown
    failure: Failure | None = None
    collectives: Mapping[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # per group: ranks, how many


@dataclass(frozen=True)
class LocalShard:
    """A DTensor as it is on one rank: the shape of the full tensor, its placements, and the local part."""

    local: Tensor
    placements: tuple
    shape: torch.Size


def serve(rank: int, setup: Setup, links: list, outputs: list) -> None:
    """Join the group, then run cells until the parent ends, or closes the link."""
    if hasattr(os, "setsid"):
        os.setsid()  # an interrupt of the parent's process group is not meant for ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # so that workers of a DataLoader know what cells define
        multiprocessing.set_start_method("fork", force=True)
    link = links[rank]
    _write_into(outputs[rank])
    for connection in (*links[:rank], *links[rank + 1 :], *outputs):
        connection.close()
    _end_with_parent(setup.folder)
    _take_environment(setup.environment)
    if setup.device == "cpu":
        from fsdp_helpers.ranks.gpus import hide_gpus

        hide_gpus()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setup.world_size), LOCAL_WORLD_SIZE=str(setup.world_size)
    )
    if sys.platform in ("linux", "darwin"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", {"linux": "lo", "darwin": "lo0"}[sys.platform])
    from fsdp_helpers.ranks.launching.stacks import written_on_request

    place = {"rank": rank, "world_size": setup.world_size, "device": setup.device}
    group = process_group(**place, init_method=setup.meeting_point, launched=True)
    with written_on_request(setup.stack_file(rank)), group:
        _limit_waiting(setup.timeout_s)
        cells = Cells(rank, setup.world_size, rank_device())
        link.send((0, Answer()))
        while (message := _receive(link)) is not None:
            number, kind, content = message
            link.send((number, cells.run(*content) if kind == "cell" else cells.get(content)))
    _leave()


def _receive(link: multiprocessing.connection.Connection) -> tuple | None:
    try:
        return link.recv()
    except (EOFError, OSError):
        return None


def _leave() -> None:
    """End without Python's clean-up: gloo's threads outlive their group."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def _write_into(output: multiprocessing.connection.Connection) -> None:
    """Send everything that this process writes into the pipe, line by line."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(output.fileno(), number)
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False))


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([parent])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _take_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _limit_waiting(timeout_s: float) -> None:
    """Give a collective so many seconds, in the group of all ranks and in those that a cell makes."""
    from datetime import timedelta

    limit = timedelta(seconds=timeout_s)
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # its name in older torch
    set_timeout(limit, dist.group.WORLD)
    dist.distributed_c10d.default_pg_timeout = limit
    dist.distributed_c10d.default_pg_nccl_timeout = limit


class Cells:
    """The module in which a rank's cells run: its names stay from cell to cell."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        # Its name is that of a script's module, so that what is shown can be copied into a script.
        module = types.ModuleType("__main__")
        module.__file__ = CELLS
        module.__spec__ = importlib.machinery.ModuleSpec("__main__", None)  # nothing for a further process to import
        module.__dict__.update(__builtins__=builtins, rank=rank, world_size=world_size, device=device)
        sys.modules["__main__"] = module
        self.names = module.__dict__
        self.source: list[str] = []
        self.running = False
        self.point_to_point = _count_point_to_point()
        if INTERRUPT is not None:
            signal.signal(INTERRUPT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self.running:
            raise KeyboardInterrupt

    def run(self, text: str, file: str) -> Answer:
        """Run a cell, and return the value of its last line, or the exception that ended it."""
        value = failure = None
        try:
            self.running = True
            value = self._execute(text, file)
            self.running = False
        except BaseException as error:
            self.running = False
            failure = describe_failure(error)
        sys.stdout.flush()
        sys.stderr.flush()
        return Answer(value, failure, self._count_collectives())

    def _execute(self, text: str, file: str) -> str | None:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        offset, known = self._keep_source(text), set(self._classes())
        tree = ast.parse(text, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        try:
            exec(compile(tree, file, "exec"), self.names)
            if last is None:
                return None
            value = eval(compile(ast.Expression(last.value), file, "eval"), self.names)
            return None if value is None or text.rstrip().endswith(";") else show_value(value)
        finally:
            for defined in set(self._classes()) - known:
                if "__firstlineno__" in vars(defined):
                    defined.__firstlineno__ += offset

    def _classes(self) -> list[type]:
        return [value for value in self.names.values() if isinstance(value, type) and value.__module__ == "__main__"]

    def _keep_source(self, text: str) -> int:
        """Let `inspect.getsource` find the classes of all cells in the file of their module; return this cell's offset.

        Up to 3.12, Python takes the first class of the name that it looks for: the newest cell stands first. Since
        3.13 it goes to the line where the class says that it begins: cells stand in the order in which they ran.
        """
        lines = f"{text}\n".splitlines(keepends=True)
        newest_first = sys.version_info < (3, 13)
        offset = 0 if newest_first else len(self.source)
        self.source = lines + self.source if newest_first else self.source + lines
        linecache.cache[CELLS] = (sum(map(len, self.source)), None, self.source, CELLS)
        return offset

    def _count_collectives(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Count the collectives of each group that this rank is in, messages from rank to rank left out."""
        counts = {}
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
            if group == dist.GroupMember.NON_GROUP_MEMBER:  # a group of other ranks
                continue
            count = group._get_sequence_number_for_group() - self.point_to_point.get(group.group_name, 0)
            counts[group.group_name] = (tuple(ranks), count)
        return counts

    def get(self, name: str) -> tuple[bool, bytes]:
        """Return whether there is such a variable, and its value, as bytes."""
        return name in self.names, pickle.dumps(portable(self.names.get(name)))


def _count_point_to_point() -> dict[str, int]:
    """Count messages from rank to rank from now on: groups number them together with their collectives."""
    counts: dict[str, int] = {}

    def counted(method: Any) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **settings: Any) -> Any:
            counts[group.group_name] = counts.get(group.group_name, 0) + 1
            return method(group, *args, **settings)

        return call

    for name in ("send", "recv", "recv_anysource"):
        setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name)))
    return counts


def show_value(value: object) -> str:
    """Return a value as a cell shows it: containers broken into lines, no memory addresses."""
    text = (
        pprint.pformat(value, width=WIDTH, compact=True, sort_dicts=False)
        if type(value) in (dict, list, tuple, set)
        else repr(value)
    )
    return without_addresses(text)


def without_addresses(text: str) -> str:
    return ADDRESS.sub("", text)


def portable(value: Any) -> Any:
    """Return `value` as another process can read it: tensors on the CPU, and what cannot be sent as its repr."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return LocalShard(portable(value.to_local()), value.placements, value.shape)
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if type(value) is dict:
        return {portable(key): portable(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(portable, value))
    try:
        _dumps(value)
    except Exception:
        return without_addresses(repr(value))
    return value


def _dumps(value: Any) -> bytes:
    import io

    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that refuses what the parent cannot import: functions and classes of cells."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in a cell")
        return NotImplemented


def describe_failure(error: BaseException) -> Failure:
    """Describe the end of a cell: its last line, the frames that are the reader's, and all of them."""
    frames = traceback.TracebackException.from_exception(error)
    details = "".join(frames.format()).rstrip()
    for one in _chain(frames):
        one.stack = traceback.StackSummary.from_list([frame for frame in one.stack if _is_the_readers(frame.filename)])
        for frame in one.stack:
            if os.path.isabs(frame.filename):
                frame.filename = os.path.basename(frame.filename)
    summary = "".join(frames.format_exception_only()).strip()
    text = without_addresses("".join(frames.format()).rstrip())
    return Failure(time.monotonic(), without_addresses(summary), text, details)


def _chain(error: traceback.TracebackException | None) -> list[traceback.TracebackException]:
    return [] if error is None else [error, *_chain(error.__cause__), *_chain(error.__context__)]


def _is_the_readers(file: str) -> bool:
    """Return whether a frame is in a cell, or in a module beside the notebook."""
    if not os.path.isabs(file):
        return file in linecache.cache
    return os.path.dirname(file) == os.getcwd()
