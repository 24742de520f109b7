"""Inside a rank that stays: it runs one cell after another in a module of its own, and answers with the result."""

import ast
import builtins
import codeop
import importlib.machinery
import linecache
import os
import pickle
import pprint
import re
import signal
import sys
import types
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_helpers.ranks.errors import Answer, Failure, describe_error
from fsdp_helpers.ranks.group import limit_waiting, process_group, rank_device
from fsdp_helpers.ranks.output import without_addresses
from fsdp_helpers.ranks.pickling import dumps
from fsdp_helpers.ranks.rank import Send, Setup, flush

INTERRUPT = signal.SIGUSR2  # the parent's request to end a cell; SIGINT is for the whole group
WIDTH = 110  # of a value that is shown over several lines
LONGER_S = 300.0  # for a collective while another rank may compile
CELLS = "<cells>"  # the file of the module in which all cells run


@dataclass(frozen=True)
class LocalShard:
    """A DTensor as one rank sees it: the shape of the full tensor, its placements, and the local shard."""

    local: Tensor
    placements: tuple
    shape: torch.Size


def serve(rank: int, setup: Setup, send: Send, link: Connection) -> None:
    """Join the group, then run cells until the parent ends or closes the link."""
    with process_group(rank, setup.world_size, **setup.group):
        cells = Cells(rank, setup, send)
        send("answer", Answer(0))
        while True:
            try:
                message = pickle.loads(link.recv_bytes())
            except (EOFError, OSError):
                return
            send("answer", cells.answer(*message))


class Cells:
    """The module in which a rank's cells run: its names persist from cell to cell."""

    def __init__(self, rank: int, setup: Setup, send: Send) -> None:
        # Its name is that of a script's module, so that what is shown can be copied into a script.
        module = types.ModuleType("__main__")
        module.__file__ = CELLS
        module.__spec__ = importlib.machinery.ModuleSpec("__main__", None)  # nothing for a further process to import
        start = {"rank": rank, "world_size": setup.world_size, "device": rank_device()}
        module.__dict__.update(start, __builtins__=builtins)
        sys.modules["__main__"] = module
        self.names, self.send = module.__dict__, send
        self.timeout_s, self.compiles = setup.timeout_s, False
        self.compile = codeop.Compile()  # remembers `from __future__ import ...`
        self.source: list[str] = []
        self.running = False
        self.point_to_point = _count_point_to_point()
        signal.signal(INTERRUPT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self.running:
            raise KeyboardInterrupt

    def answer(self, number: int, kind: str, *content: str) -> Answer:
        """Run a cell, or look up a variable: return the value, or the exception that ended it."""
        value = failure = None
        try:
            self.running = True
            value = self._run(*content) if kind == "cell" else self._look_up(*content)
            self.running = False
        except BaseException as error:
            self.running = False
            here = f"{os.getcwd()}{os.sep}"
            failure = Failure(*(without_addresses(said.replace(here, "")) for said in describe_error(error, _is_shown)))
        flush()
        return Answer(number, value, failure, self._count_collectives())

    def _look_up(self, name: str) -> list:
        """Return the variable as the only item of a list, which is empty if there is none of this name."""
        return [portable(self.names[name])] if name in self.names else []

    def _run(self, text: str, file: str) -> str | None:
        """Run a cell; return the value of its last line as it is shown."""
        self._limit_waiting(text)
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        offset, known = self._keep_source(text), self._classes()
        statements, last = ast.parse(text, file).body, None
        if statements and isinstance(statements[-1], ast.Expr):
            last = statements.pop()
        try:
            for statement in statements:
                self.send("note", statement.lineno)  # a process that dies cannot say it any more
                exec(self.compile(ast.Module([statement], []), file, "exec"), self.names)  # type: ignore[arg-type]
            if last is None:
                return None
            self.send("note", last.lineno)
            value = eval(self.compile(ast.Expression(last.value), file, "eval"), self.names)  # type: ignore[arg-type]
            return None if value is None or text.rstrip().endswith(";") else show_value(value)
        finally:
            for defined in self._classes() - known:
                if "__firstlineno__" in vars(defined):
                    defined.__firstlineno__ += offset

    def _limit_waiting(self, text: str) -> None:
        """Give collectives longer from the first cell that compiles, and NCCL's first one: ranks may take different times."""
        self.compiles = self.compiles or re.search(r"\bcompile\b", text) is not None
        first_of_nccl = self.names["device"].type == "cuda" and not any(self._count_collectives().values())
        limit_waiting(max(self.timeout_s, LONGER_S) if self.compiles or first_of_nccl else self.timeout_s)

    def _classes(self) -> set[type]:
        return {value for value in self.names.values() if isinstance(value, type) and value.__module__ == "__main__"}

    def _keep_source(self, text: str) -> int:
        """Make `inspect.getsource` find the classes of all cells in the file of their module; return this cell's offset.

        Up to 3.12, Python finds the first class of that name, so the newest cell comes first. Since 3.13, it goes to
        the line where the class says it begins, so cells are in the order in which they ran.
        """
        lines = f"{text}\n".splitlines(keepends=True)
        newest_first = sys.version_info < (3, 13)
        offset = 0 if newest_first else len(self.source)
        self.source = lines + self.source if newest_first else self.source + lines
        linecache.cache[CELLS] = (sum(map(len, self.source)), None, self.source, CELLS)
        return offset

    def _count_collectives(self) -> dict[tuple, int]:
        """Count the collectives of each group that this rank is in, without messages between single ranks."""
        return {
            (group.group_name, *dist.get_process_group_ranks(group)): group._get_sequence_number_for_group()
            - self.point_to_point.get(group.group_name, 0)
            for group in dist.distributed_c10d._world.pg_map
        }


def _count_point_to_point() -> dict[str, int]:
    """Count messages from rank to rank from now on, since groups number them together with their collectives."""
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
    """Format a value as a cell shows it: containers broken into lines, no memory addresses."""
    if type(value) in (dict, list, tuple, set):
        return without_addresses(pprint.pformat(value, width=WIDTH, compact=True, sort_dicts=False))
    return without_addresses(repr(value))


def portable(value: Any) -> Any:
    """Return `value` in a form that another process can read: tensors on the CPU, and the repr of anything unpicklable."""
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
        dumps(value)
    except Exception:
        return without_addresses(repr(value))
    return value


def _is_shown(file: str) -> bool:
    """Return True if a file is the reader's: a cell, or a module next to the notebook."""
    return os.path.dirname(file) == os.getcwd() if os.path.isabs(file) else file in linecache.cache
