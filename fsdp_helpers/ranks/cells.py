"""The code inside a live rank, which runs cells one after another in its own module and sends back each result."""

import ast
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
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_helpers.ranks.errors import Answer, Failure, describe_error
from fsdp_helpers.ranks.group import limit_waiting, process_group, rank_device
from fsdp_helpers.ranks.launch import dumps
from fsdp_helpers.ranks.rank import Send, flush

INTERRUPT = signal.SIGUSR2  # how the parent tells a rank to end its cell; SIGINT goes to a whole process group
WIDTH = 110  # characters in a line, if a value is shown on several lines
LONGER_S = 300.0  # for a collective, while another rank may still be compiling
CELLS = "<cells>"  # the file of the module in which all cells run
ADDRESS = re.compile(r"( object)? at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class LocalShard:
    """A DTensor as one rank sees it: the shape of the full tensor, its placements, and the local shard."""

    local: Tensor
    placements: tuple
    shape: torch.Size


def serve(timeout_s: float, rank: int, world_size: int, group: dict, send: Send, link: Connection) -> None:
    """Join the group, then run cells until the parent stops this process."""
    with process_group(rank, world_size, **group):
        cells = Cells(rank, world_size, timeout_s, send)
        while True:
            send("answer", cells.answer(*pickle.loads(link.recv_bytes())))


class Cells:
    """The module in which a rank's cells run: its names persist from cell to cell."""

    def __init__(self, rank: int, world_size: int, timeout_s: float, send: Send) -> None:
        # It's called `__main__`, as in a script, so that code from the notebook can be copied into one.
        module = types.ModuleType("__main__")
        module.__file__ = CELLS
        # This way, processes that a cell starts don't try to import its module.
        module.__spec__ = importlib.machinery.ModuleSpec("__main__", None)
        module.__dict__.update(rank=rank, world_size=world_size, device=rank_device())
        sys.modules["__main__"] = module
        self.names, self.send = module.__dict__, send
        self.timeout_s, self.compiles = timeout_s, False
        self.compile = codeop.Compile()  # remembers `from __future__ import ...`
        self.source: list[str] = []
        self.point_to_point = _count_point_to_point()
        signal.signal(INTERRUPT, signal.SIG_IGN)

    def answer(self, number: int, kind: str, *content: Any) -> Answer:
        """Run a cell or look up a variable; return an Answer with the value, or with the exception that stopped it."""
        value = failure = None
        try:
            signal.signal(INTERRUPT, signal.default_int_handler)  # it raises KeyboardInterrupt
            value = self._run(*content) if kind == "cell" else self._look_up(*content)
            signal.signal(INTERRUPT, signal.SIG_IGN)
        except BaseException as error:
            signal.signal(INTERRUPT, signal.SIG_IGN)
            here = f"{os.getcwd()}{os.sep}"
            failure = Failure(*(without_addresses(said.replace(here, "")) for said in describe_error(error, _is_shown)))
        flush()
        return Answer(number, value, failure, self._count_collectives())

    def _look_up(self, name: str) -> list:
        """Return a list that contains only the variable's value; an empty list if no variable has this name."""
        return [portable(self.names[name])] if name in self.names else []

    def _run(self, text: str, file: str, record: Callable | None) -> str | None:
        """Run a cell, within `record` if it's traced; return the value of its last line, as a notebook shows it."""
        with record(self.send, self.names["device"]) if record else nullcontext():
            return self._run_statements(text, file)

    def _run_statements(self, text: str, file: str) -> str | None:
        self._limit_waiting(text)
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        self._keep_source(text)
        value = None
        for statement in ast.parse(text, file).body:
            value = None
            self.send("note", statement.lineno)  # in advance, since a process that has died can't report it
            if isinstance(statement, ast.Expr):
                value = eval(self.compile(ast.Expression(statement.value), file, "eval"), self.names)
            else:
                exec(self.compile(ast.Module([statement], []), file, "exec"), self.names)
        if value is None or text.rstrip().endswith(";"):
            return None
        wrapped = type(value) in (dict, list, tuple, set)
        return pprint.pformat(value, width=WIDTH, compact=True, sort_dicts=False) if wrapped else repr(value)

    def _limit_waiting(self, text: str) -> None:
        """Set a longer timeout once a cell compiles, and for NCCL's first collective, since some ranks may be slow."""
        self.compiles = self.compiles or re.search(r"\bcompile\b", text) is not None
        first_of_nccl = self.names["device"].type == "cuda" and not any(self._count_collectives().values())
        limit_waiting(max(self.timeout_s, LONGER_S) if self.compiles or first_of_nccl else self.timeout_s)

    def _keep_source(self, text: str) -> None:
        """Put this cell in front of the source in which `inspect.getsource` finds classes.

        Up to 3.12, Python uses the first class with that name. Since 3.13, it uses the class at line
        `__firstlineno__`, so the classes of earlier cells move down.
        """
        lines = f"{text}\n".splitlines(keepends=True)
        for known in {value for value in self.names.values() if isinstance(value, type)}:
            if known.__module__ == "__main__" and "__firstlineno__" in vars(known):
                known.__firstlineno__ += len(lines)
        self.source = lines + self.source
        linecache.cache[CELLS] = (sum(map(len, self.source)), None, self.source, CELLS)

    def _count_collectives(self) -> dict[tuple, int]:
        """Return the number of collectives that each group of this rank has run, excluding point-to-point messages."""
        return {
            (group.group_name, *dist.get_process_group_ranks(group)): group._get_sequence_number_for_group()
            - self.point_to_point[group.group_name]
            for group in dist.distributed_c10d._world.pg_map
        }


def _count_point_to_point() -> Counter[str]:
    """Return a live count of the sequence numbers that point-to-point messages take, by group.

    Gloo numbers each message. NCCL numbers none, except a batch of them (`batch_isend_irecv`) in some versions of torch,
    which this doesn't see.
    """
    counts: Counter[str] = Counter()
    for name in ("send", "recv", "recv_anysource"):

        def counted(group: Any, *args: Any, method: Any = getattr(dist.ProcessGroup, name), **settings: Any) -> Any:
            before = group._get_sequence_number_for_group()
            work = method(group, *args, **settings)
            counts[group.group_name] += group._get_sequence_number_for_group() - before
            return work

        setattr(dist.ProcessGroup, name, counted)
    return counts


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
        dumps(value, "the value")
    except Exception:
        return without_addresses(repr(value))
    return value


def without_addresses(text: str) -> str:
    """Return `text` without memory addresses, which differ from run to run."""
    return ADDRESS.sub("", text)


def _is_shown(file: str) -> bool:
    """Return True if a file belongs to the reader: a cell, or a module next to the notebook."""
    return os.path.dirname(file) == os.getcwd() if os.path.isabs(file) else file in linecache.cache
