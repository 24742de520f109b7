"""Live ranks: processes in one group that run a cell, keep its variables, and wait for the next one."""

import atexit
import math
import pickle
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import follow_edits
from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.cells import INTERRUPT, Answer, serve
from fsdp_helpers.ranks.errors import Interrupted, RankError, shown_by_message
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
    seconds (half an hour if it is None), or five minutes from the first cell on that compiles. The ranks end with `close()`, with a `with` block,
    and with this process.

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
        self._number = 0  # of the last message: an answer has the number of what it answers
        self._num_cells, self._cell = 0, ""
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
        chosen = self._choose(ranks)
        compile(code, name, "exec")  # a syntax error runs on no rank
        self._get_ready()
        self._cell, self._lines = name, {}
        answers: dict[int, Answer] = {}
        output = CellOutput()
        self._processes.on_output = output.add
        try:
            self._tell(chosen, "cell", (code, name))
            self._collect(chosen, answers)
        except KeyboardInterrupt:
            with interrupts_wait():
                output.finish({})
                lines = self._settle(chosen, answers)[1]
            raise Interrupted("\n".join(["interrupted", *lines])) from None
        output.finish({rank: answer.value for rank, answer in answers.items()})
        if len(answers) < len(chosen) or any(answer.failure for answer in answers.values()) or self._behind():
            with interrupts_wait():
                cause, lines = self._settle(chosen, answers)
            rank, summary, _ = cause
            raise RankError(rank, self.world_size, summary, "\n".join(lines))

    def __getitem__(self, name: str) -> list:
        """Return this variable on every rank, in rank order.

        Tensors are detached and on the CPU, a DTensor becomes a LocalShard, and values that can't be sent become their
        repr. Raises NameError if a rank has no such variable.
        """
        everyone = range(self.world_size)
        answers: dict[int, tuple[bool, bytes]] = {}
        self._get_ready()
        self._tell(everyone, "get", name)
        self._collect(everyone, answers)
        if missing := [rank for rank in everyone if rank not in answers or not answers[rank][0]]:
            with shown_by_message(NameError):
                raise NameError(f"{name!r} is not defined on {list_ranks(missing)}")
        return [pickle.loads(answers[rank][1]) for rank in everyone]

    # ------------------------------------------------------------ starting and restarting

    def _start(self) -> None:
        """Start new ranks; `_await_start` waits until they have joined."""
        self._number += 1
        self._counts: dict[int, dict] = {}  # per rank: how many collectives of each group it has taken part in
        self._lines: dict[int, int] = {}  # per rank: the line of its cell that it is at
        settings = {"timeout_s": self.timeout_s, "payload": self._number}
        self._processes = Processes(serve, self.world_size, self.device, CellOutput().add, **settings)
        self._joining = True

    def _await_start(self) -> None:
        answers: dict[int, Any] = {}
        try:
            self._collect(range(self.world_size), answers, START_S)
            for rank, answer in answers.items():
                if answer is not None:
                    raise RankError(rank, self.world_size, answer.failure.summary, answer.failure.details)
            for rank in self._processes.ends:
                raise RankError(rank, self.world_size, self._processes.describe_end(rank))
            if len(answers) < self.world_size:
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
        self._number += 1

    # ------------------------------------------------------------ one message and its answers

    def _choose(self, ranks: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if wrong := [rank for rank in chosen if rank not in range(self.world_size)]:
            with shown_by_message(ValueError):
                raise ValueError(f"there is no {list_ranks(wrong)}; these ranks are 0 to {self.world_size - 1}")
        return chosen

    def _tell(self, ranks: Iterable[int], kind: str, content: Any) -> None:
        for rank in ranks:
            with suppress(OSError):  # it has just ended, as `_collect` will see
                self._processes.links[rank].send_bytes(pickle.dumps((self._number, kind, content)))

    def _collect(self, ranks: Iterable[int], answers: dict[int, Any], limit_s: float | None = None) -> None:
        """Receive the answers to the last message; after one failure or end, only those that arrive soon."""
        until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        failed = False
        while waiting := [rank for rank in ranks if rank not in answers and rank not in self._processes.ends]:
            if (left_s := until_s - time.monotonic()) <= 0:
                return
            for rank, kind, content in self._processes.wait(waiting, left_s):
                if kind == "line":
                    self._lines[rank] = content
                elif kind == "failure":  # not of a cell: of the rank
                    answers[rank] = Answer(failure=content)
                elif kind == "answer" and content[0] == self._number:  # else of a cell that was interrupted
                    answers[rank] = content[1]
                    if isinstance(content[1], Answer):
                        self._counts[rank] = content[1].collectives
            bad = any(isinstance(answer, Answer) and answer.failure for answer in answers.values())
            if not failed and limit_s is None and (bad or self._processes.ends):
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

    def _settle(self, chosen: list[int], answers: dict[int, Answer]) -> tuple[tuple[int, str, str], list[str]]:
        """Get all ranks ready for the next cell, restarting them if necessary; return the cause, and the lines that describe it."""
        missing = [rank for rank in chosen if rank not in answers]
        self._processes.note_ends()
        running = [rank for rank in missing if rank not in self._processes.ends]
        found = self._processes.stacks(running)
        for rank in running:
            self._processes.signal(rank, INTERRUPT)
        back = dict(answers)
        if not all(map(stacks.is_in_collective, found.values())):
            self._collect(missing, back, BACK_S)  # one in a collective does not come back: others have ended it
        cause = self._find_cause(answers)
        places = {rank: stacks.describe(stack) for rank, stack in found.items()}
        lines = [cause[2]] if cause[2] else []
        lines += [self._tell_of(rank, cause, answers, places) for rank in chosen if rank != cause[0]]
        in_vain = any(answer.failure and waited_in_vain(answer.failure.summary) for answer in answers.values())
        kept = len(back) == len(chosen) and not self._processes.ends and not in_vain and not self._behind()
        if not kept:
            self._restart()
        return cause, [*lines, KEPT if kept else GONE]

    def _tell_of(
        self, rank: int, cause: tuple[int, str, str], answers: dict[int, Answer], places: dict[int, str]
    ) -> str:
        """Say what became of a rank that is not the cause."""
        if rank in answers and (failure := answers[rank].failure):
            same = failure.details == cause[2]
            return f"rank {rank} failed {'in the same way' if same else 'too: ' + failure.details}"
        if rank in self._processes.ends:
            return f"rank {rank} has ended: {self._processes.describe_end(rank)}"
        if rank in places:
            return f"rank {rank} {places[rank]}"
        missed = self._behind().get(rank, 0)
        return f"rank {rank} had finished the cell" + (f", and {_no_part_in(missed)}" if missed else "")

    def _find_cause(self, answers: dict[int, Answer]) -> tuple[int, str, str]:
        """Return the first rank that failed by itself, what happened there, and its traceback.

        The others fail because they wait for it in vain. The rank is -1 if none has failed: the cell was interrupted.
        """
        failures = {rank: answer.failure for rank, answer in sorted(answers.items()) if answer.failure}
        own = {rank: failure for rank, failure in failures.items() if not waited_in_vain(failure.summary)}
        ends = sorted(self._processes.ends.keys() - own.keys())
        for rank, failure in (own or ({} if ends else failures)).items():
            return rank, failure.summary, failure.details
        for rank in ends:
            line = self._lines.get(rank)
            at_line = f"It was at {self._cell} line {line}." if line is not None else ""
            return rank, self._processes.describe_end(rank), at_line
        for rank, count in sorted(self._behind().items()):
            return rank, f"it {_no_part_in(count)}", ""
        return -1, "", ""


def _no_part_in(count: int) -> str:
    return f"took no part in {'a collective' if count == 1 else f'{count} collectives'} that others began"


def _close_all() -> None:
    for ranks in open_ranks():
        ranks.close()


atexit.register(_close_all)  # before multiprocessing's own function, which would wait for the ranks
