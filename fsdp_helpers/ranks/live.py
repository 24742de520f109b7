"""Live ranks: processes in one group that run a cell, keep its variables, and wait for the next one."""

import atexit
import math
import pickle
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import follow_edits
from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.cells import INTERRUPT, Answer, serve
from fsdp_helpers.ranks.errors import Failure, Interrupted, RankError, shown_by_message
from fsdp_helpers.ranks.group import LONGEST_WAIT_S, check_seconds, check_world_size
from fsdp_helpers.ranks.output import CellOutput
from fsdp_helpers.ranks.processes import Processes
from fsdp_helpers.ranks.roll_call import list_ranks, waited_in_vain
from fsdp_helpers.ranks.server import check_not_imported, interrupts_wait

START_S = 300.0  # for all ranks to load what they need and to join
GRACE_S = 0.3  # after a failure: for what the other ranks have to say
BACK_S = 2.0  # after a failure, or Stop: for the other ranks to come back; else the group restarts
KEPT = "The ranks keep their variables."
GONE = "The ranks were restarted, and their variables are gone."

_open: list[weakref.ref["Ranks"]] = []


def open_ranks() -> list["Ranks"]:
    """Return all open ranks, the most recent ones last."""
    return [ranks for reference in _open if (ranks := reference()) is not None]


def opened_last() -> "Ranks":
    """Return the ranks that `%%ranks` runs on; RuntimeError if none are open."""
    if not (ranks := open_ranks()):
        raise RuntimeError("no ranks are open; open some first: ranks = Ranks(2)")
    return ranks[-1]


class Ranks:
    """Processes in one group that stay between cells.

    Each runs the same code, in a module of its own with `rank`, `world_size` and `device`; what it defines there stays.
    In a notebook, `%load_ext fsdp_helpers`, then begin a cell with `%%ranks`, or `%%ranks 0` for some of the ranks.

        with Ranks(2, device="cpu") as ranks:
            ranks.run("import torch.distributed as dist; print(dist.get_rank())")
            ranks["rank"]

    `device` is "cpu", "cuda" (each rank gets a GPU of its own) or "auto". A collective gives up after `timeout_s`
    seconds (half an hour if it is None), or five minutes from the first cell on that compiles. The ranks end with
    `close()`, with a `with` block, and with this process.

    Raises ValueError before anything starts: fewer than one rank, fewer GPUs than ranks, an unknown device.
    """

    def __init__(self, world_size: int, device: str = "auto", timeout_s: float | None = 20.0) -> None:
        check_not_imported()
        with shown_by_message(ValueError):
            check_world_size(world_size)
            check_seconds(timeout_s=timeout_s)
            self.device = choose_device(device, world_size)
        self.world_size, self.timeout_s = world_size, timeout_s or LONGEST_WAIT_S
        self._processes: Processes | None = None
        self._num_cells = self._num_asked = 0
        with shown_by_message(RankError):
            self._start()
            self._await_start()
        _open.append(weakref.ref(self))

    def __repr__(self) -> str:
        state = "closed" if self._processes is None else f"on {self.device}"
        return f"Ranks({self.world_size}, {state})"

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # of one whose arguments were refused
            self.close()

    def close(self) -> None:
        """End the ranks; their variables are gone. You can call it more than once."""
        _open[:] = [reference for reference in _open if reference() not in (None, self)]
        with interrupts_wait():
            processes, self._processes = self._processes, None
            if processes is not None:
                processes.end()

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [] if self._processes is None else self._processes.pids

    @property
    def folder(self) -> str | None:
        """The private folder in which the group meets."""
        return None if self._processes is None else self._processes.folder

    def run(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Run `code` on every rank, or on `ranks`; show what it prints and the value of its last line.

        Output is shown once if all ranks agree, else rank by rank. Raises SyntaxError before anything runs, RankError
        if a rank fails or dies, Interrupted after ^C or Stop, ValueError for a rank that doesn't exist.
        """
        self._num_cells += 1
        self.run_cell(code, ranks, f"cell {self._num_cells}")

    def run_cell(self, code: str, ranks: Sequence[int] | None, name: str) -> None:
        """Run a cell under this name, which tracebacks show."""
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if wrong := [rank for rank in chosen if rank not in range(self.world_size)]:
            with shown_by_message(ValueError):
                raise ValueError(f"there is no {list_ranks(wrong)}; these ranks are 0 to {self.world_size - 1}")
        compile(code, name, "exec")  # a syntax error runs on no rank
        self._get_ready()
        self._cell, self._lines = name, {}
        output = CellOutput()
        self._processes.on_output = output.add
        try:
            self._ask(chosen, "cell", code, name)
        except KeyboardInterrupt:
            with interrupts_wait():
                output.finish({})
                _, lines = self._settle(chosen, failed=False)
            raise Interrupted("\n".join(["interrupted", *lines])) from None
        output.finish({rank: answer.value for rank, answer in self._answers.items()})
        if self._find_cause():
            with interrupts_wait():
                (rank, failure), lines = self._settle(chosen, failed=True)
            raise RankError(rank, self.world_size, failure.summary, "\n".join(lines))

    def __getitem__(self, name: str) -> list:
        """Return this variable on every rank, in rank order.

        Tensors are detached and on the CPU, a DTensor becomes a LocalShard, and values that can't be sent become their
        repr. Raises NameError if a rank has no such variable.
        """
        everyone = range(self.world_size)
        self._get_ready()
        self._ask(everyone, "get", name)
        if missing := [rank for rank in everyone if rank not in self._answers or not self._answers[rank].value]:
            with shown_by_message(NameError):
                raise NameError(f"{name!r} is not defined on {list_ranks(missing)}")
        return [self._answers[rank].value[0] for rank in everyone]

    # ------------------------------------------------------------ starting and restarting

    def _start(self) -> None:
        """Start new ranks; `_await_start` waits until they have joined."""
        self._number, self._answers, self._lines = 0, {}, {}  # of the last message, and what came back
        self._counts: dict[int, dict] = {}  # per rank: how many collectives of each group it has taken part in
        self._processes = Processes(serve, self.world_size, self.device, CellOutput().add, timeout_s=self.timeout_s)
        self._joining = True

    def _await_start(self) -> None:
        everyone = range(self.world_size)
        try:
            self._collect(everyone, START_S)
            if cause := self._find_cause():
                raise RankError(cause[0], self.world_size, cause[1].summary, cause[1].details)
            if len(self._answers) < self.world_size:
                raise TimeoutError(f"the ranks didn't start within {START_S:.0f} s")
        except BaseException:
            self.close()
            raise
        self._joining = False

    def _restart(self) -> None:
        self._processes.end()
        self._start()

    def _get_ready(self) -> None:
        """Make sure that there are ranks to run a cell: if some have ended since the last one, say so, and start new ones."""
        if self._processes is None:
            raise RuntimeError("these ranks are closed; open new ones: ranks = Ranks(2)")
        follow_edits()
        if self._joining:  # after a restart
            self._await_start()
        self._processes.note_ends()
        if self._processes.ends:
            ends = [f"Rank {rank} had ended: {self._processes.describe_end(rank)}." for rank in self._processes.ends]
            with interrupts_wait():
                self._restart()
            print(*ends, GONE, file=sys.stderr)
            self._await_start()

    # ------------------------------------------------------------ one message and its answers

    def _ask(self, ranks: Iterable[int], kind: str, *content: str) -> None:
        """Send a message to these ranks, and collect their answers."""
        self._number, self._answers = self._number + 1, {}
        for rank in ranks:
            with suppress(OSError):  # it has just ended, as `_collect` will see
                self._processes.links[rank].send_bytes(pickle.dumps((self._number, kind, content)))
        self._collect(ranks)

    def _collect(self, ranks: Iterable[int], limit_s: float = math.inf, failed: bool = False) -> None:
        """Receive the answers to the last message; after one failure or end, only those that arrive soon."""
        until_s = time.monotonic() + limit_s
        while waiting := [rank for rank in ranks if rank not in self._answers and rank not in self._processes.ends]:
            if (left_s := until_s - time.monotonic()) <= 0:
                return
            for rank, kind, content in self._processes.wait(waiting, left_s):
                if kind == "line":
                    self._lines[rank] = content
                elif kind == "failure":  # not of a cell: of the rank
                    self._answers[rank] = Answer(failure=content)
                elif kind == "answer" and content[0] == self._number:  # else of a cell that was interrupted
                    self._answers[rank] = content[1]
                    self._counts[rank] = content[1].collectives
            if not failed and (self._processes.ends or any(answer.failure for answer in self._answers.values())):
                failed, until_s = True, time.monotonic() + GRACE_S

    # ------------------------------------------------------------ a cell that did not end well

    def _behind(self) -> dict[int, int]:
        """Return by how many collectives ranks are behind the others of a group; {} if all are equal."""
        most: dict[tuple, int] = {}
        for counts in self._counts.values():
            most |= {group: max(most.get(group, 0), count) for group, count in counts.items()}
        behind = {
            rank: max((most[group] - count for group, count in counts.items()), default=0)
            for rank, counts in self._counts.items()
        }
        return {rank: count for rank, count in behind.items() if count}

    def _find_cause(self) -> tuple[int, Failure] | None:
        """Return the first rank that failed by itself, and how; None if all did their part.

        The others fail because they wait for it.
        """
        failures = {rank: answer.failure for rank, answer in sorted(self._answers.items()) if answer.failure}
        own = {rank: failure for rank, failure in failures.items() if not waited_in_vain(failure.summary)}
        ends = [(rank, self._describe_end(rank)) for rank in sorted(self._processes.ends.keys() - own.keys())]
        missed = [(rank, Failure(f"it {_no_part_in(count)}")) for rank, count in sorted(self._behind().items())]
        return next(iter([*own.items(), *ends, *failures.items(), *missed]), None)

    def _describe_end(self, rank: int) -> Failure:
        line = self._lines.get(rank)
        at_line = f"It was at {self._cell} line {line}." if line is not None else ""
        return Failure(self._processes.describe_end(rank), at_line)

    def _settle(self, chosen: list[int], failed: bool) -> tuple[tuple[int, Failure] | None, list[str]]:
        """Get all ranks ready for the next cell, restarting them if necessary; return the cause, and the lines that describe it."""
        self._processes.note_ends()
        cause, answers = self._find_cause() if failed else None, dict(self._answers)
        running = [rank for rank in chosen if rank not in answers and rank not in self._processes.ends]
        found = self._processes.stacks(running)
        for rank in running:
            self._processes.signal(rank, INTERRUPT)
        if not all(map(stacks.is_in_collective, found.values())):
            self._collect(running, BACK_S, failed=True)  # one in a collective doesn't come back: others have ended it
        at_fault, details = (cause[0], cause[1].details) if cause else (None, "")
        lines = [details] if details else []
        for rank in chosen:
            if rank in found:
                lines.append(f"rank {rank} {stacks.describe(found[rank])}")
            elif rank != at_fault:
                lines.append(f"rank {rank} {self._describe(rank, answers.get(rank), details)}")
        in_vain = any(answer.failure and waited_in_vain(answer.failure.summary) for answer in answers.values())
        kept = len(self._answers) == len(chosen) and not (self._processes.ends or in_vain or self._behind())
        if not kept:
            self._restart()
        return cause, [*lines, KEPT if kept else GONE]

    def _describe(self, rank: int, answer: Answer | None, details: str) -> str:
        """Say what became of a rank that is neither running nor at fault; `details` are those of the one at fault."""
        if answer is None:
            return f"has ended: {self._processes.describe_end(rank)}"
        if answer.failure:
            same = answer.failure.details == details
            return "failed in the same way" if same else f"failed too: {answer.failure.details}"
        missed = self._behind().get(rank)
        return "had finished the cell" + (f", and {_no_part_in(missed)}" if missed else "")


def _no_part_in(count: int) -> str:
    return f"took no part in {'a collective' if count == 1 else f'{count} collectives'} that others began"


def _close_all() -> None:
    for ranks in open_ranks():
        ranks.close()


atexit.register(_close_all)  # before multiprocessing's own function, which would wait for the ranks
