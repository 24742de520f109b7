"""Ranks that stay: processes in one group that run a cell, keep its variables, and wait for the next one."""

import atexit
import math
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fsdp_helpers.ranks.cells import INTERRUPT, Answer, serve
from fsdp_helpers.ranks.edited_modules import follow_edits
from fsdp_helpers.ranks.errors import Interrupted, RankError, shown_by_message
from fsdp_helpers.ranks.group import choose_device
from fsdp_helpers.ranks.output import CellOutput
from fsdp_helpers.ranks.processes import Processes
from fsdp_helpers.ranks.rank import Failure
from fsdp_helpers.ranks.roll_call import WAITED_IN_VAIN, list_ranks
from fsdp_helpers.ranks.server import check_not_imported, interrupts_wait

START_S = 300.0  # for all ranks to load what they need and to join
GRACE_S = 0.3  # after a failure: for what the other ranks have to say
BACK_S = 2.0  # after a failure, or Stop: for the other ranks to come back; else the group restarts
IDLE_S = 3 * 3600.0  # without a cell: then ranks end, and give their memory back
KEPT = "The ranks keep their variables."
GONE = "The ranks were restarted, and their variables are gone."

_open: list[weakref.ref["Ranks"]] = []


def open_ranks() -> list["Ranks"]:
    """Return all ranks that are open, those opened last at the end."""
    return [ranks for reference in _open if (ranks := reference()) is not None]


def opened_last() -> "Ranks":
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
    seconds, or five minutes from the first cell on that compiles. The ranks end with `close()`, with a `with` block,
    with this process, and after three hours without a cell.

    Raises ValueError before anything starts: fewer than one rank, fewer GPUs than ranks, an unknown device.
    """

    def __init__(self, world_size: int, device: str = "auto", timeout_s: float = 20.0) -> None:
        check_not_imported()
        with shown_by_message(ValueError):
            if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
                raise ValueError(f"world_size is {world_size!r}; it must be a whole number, 1 or more")
            if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
                raise ValueError(f"timeout_s is {timeout_s!r}; it must be a number of seconds above 0")
            self.device = choose_device(device, world_size)
        self.world_size, self.timeout_s = world_size, timeout_s
        self._processes: Processes | None = None
        self._number = 0  # of the last message: an answer has the number of what it answers
        self._ended_idle = False
        self._num_cells, self._cell = 0, ""
        self._counts: dict[int, dict] = {}  # per rank: how many collectives of each group it has taken part in
        self._idle = threading.Timer(IDLE_S, _end_idle, [weakref.ref(self)])
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
        """End the ranks; their variables are gone. It may be called again."""
        _open[:] = [reference for reference in _open if reference() not in (None, self)]
        self._idle.cancel()
        with interrupts_wait():
            processes, self._processes = self._processes, None
            if processes is not None:
                processes.end()

    @property
    def pids(self) -> list[int]:
        return [] if self._processes is None else self._processes.pids

    @property
    def folder(self) -> str | None:
        """The private folder in which the group meets."""
        return None if self._processes is None else self._processes.folder

    def run(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Run `code` on every rank, or on `ranks`; show what it prints and the value of its last line.

        The output is shown once where all ranks agree, else rank by rank. Raises SyntaxError before anything runs,
        RankError if a rank fails or dies, Interrupted after ^C or Stop, ValueError for a rank that there is not.
        """
        self._num_cells += 1
        self.run_cell(code, ranks, f"cell {self._num_cells}")

    def run_cell(self, code: str, ranks: Sequence[int] | None, name: str) -> None:
        """Run a cell that tracebacks call by this name."""
        chosen = self._choose(ranks)
        compile(code, name, "exec")  # a syntax error runs on no rank
        self._get_ready()
        self._cell = name
        answers: dict[int, Answer] = {}
        with CellOutput() as output:
            self._processes.on_output = output.add
            try:
                self._tell(chosen, "cell", (code, name))
                self._collect(chosen, answers)
            except KeyboardInterrupt:
                with interrupts_wait():
                    lines = self._settle(chosen, answers)[1]
                raise Interrupted("\n".join(["interrupted", *lines])) from None
            output.finish({rank: answer.value for rank, answer in answers.items()})
            if len(answers) < len(chosen) or any(answer.failure for answer in answers.values()) or self._behind():
                with interrupts_wait():
                    cause, lines = self._settle(chosen, answers)
                raise RankError(cause.rank, self.world_size, cause.summary, "\n".join(lines))

    def __getitem__(self, name: str) -> list:
        """Return this variable on every rank, in rank order.

        Tensors come detached and on the CPU, a DTensor as a LocalShard, what cannot be sent as its repr. Raises
        NameError if a rank has no such variable.
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
        self._number, self._counts = self._number + 1, {}
        settings = {"timeout_s": self.timeout_s, "payload": self._number}
        self._processes = Processes(serve, self.world_size, self.device, CellOutput().add, **settings)
        self._joining = True

    def _await_start(self) -> None:
        answers: dict[int, Any] = {}
        try:
            self._collect(range(self.world_size), answers, START_S)
            if any(answers.values()) or len(answers) < self.world_size:
                raise self._start_error(answers)
        except BaseException:
            self.close()
            raise
        self._joining = False

    def _start_error(self, answers: dict[int, Any]) -> Exception:
        for rank, answer in answers.items():
            if answer is not None:
                return RankError(rank, self.world_size, answer.failure.summary, answer.failure.details)
        for rank in self._processes.ends:
            if details := self._processes.own_traceback(rank):
                return RankError(rank, self.world_size, details.splitlines()[-1], details)
        for rank in self._processes.ends:
            return RankError(rank, self.world_size, self._processes.describe_end(rank))
        return TimeoutError(f"the ranks did not start within {START_S:.0f} s")

    def _restart(self) -> None:
        self._processes.end()
        self._start()

    def _get_ready(self) -> None:
        """Have ranks that can run a cell: if some have ended since the last one, say so, and start new ones."""
        if self._processes is None:
            raise RuntimeError("these ranks are closed; open new ones: ranks = Ranks(2)")
        follow_edits()
        self._idle.cancel()
        if self._joining:  # after a restart
            self._await_start()
        self._processes.note_ends()
        if ends := self._processes.ends:
            if self._ended_idle:
                said = f"The ranks had ended, after {IDLE_S / 3600:g} hours without a cell."
            else:
                said = ". ".join(f"Rank {rank} had ended: {self._processes.describe_end(rank)}" for rank in ends) + "."
            with interrupts_wait():
                self._restart()
            print(f"{said} {GONE}", file=sys.stderr)
            self._await_start()
        self._number += 1
        self._ended_idle = False
        self._idle = threading.Timer(IDLE_S, _end_idle, [weakref.ref(self)])
        self._idle.daemon = True
        self._idle.start()

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
        """Receive the answers to the last message; after one failure or end, those that come soon."""
        until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        failed = False
        while waiting := [rank for rank in ranks if rank not in answers and rank not in self._processes.ends]:
            if (left_s := until_s - time.monotonic()) <= 0:
                return
            for rank, kind, content in self._processes.wait(waiting, left_s):
                if kind == "failure":  # not of a cell: of the rank
                    answers[rank] = Answer(failure=content)
                    self._processes.note_end(rank)
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
        most: dict[Any, int] = {}
        for counts in self._counts.values():
            for group, count in counts.items():
                most[group] = max(most.get(group, 0), count)
        differences = {
            rank: max((most[group] - count for group, count in counts.items()), default=0)
            for rank, counts in self._counts.items()
        }
        return {rank: behind for rank, behind in differences.items() if behind}

    def _settle(self, chosen: list[int], answers: dict[int, Answer]) -> tuple["_Cause", list[str]]:
        """Have all ranks ready for the next cell, restarted if need be; return the cause, and the lines that tell it."""
        missing = [rank for rank in chosen if rank not in answers]
        self._processes.note_ends()
        running = [rank for rank in missing if rank not in self._processes.ends]
        self._processes.ask_where(running)
        places = {rank: self._processes.where(rank) for rank in running}
        for rank in running:
            self._processes.signal(rank, INTERRUPT)
        back = dict(answers)
        if not all(self._processes.is_in_collective(rank) for rank in running):
            self._collect(missing, back, BACK_S)  # none of those comes back, since a rank that they wait for has ended
        cause, lines = self._tell_what_happened(chosen, answers, places)
        in_vain = any(_waited_in_vain(answer.failure) for answer in answers.values())
        kept = len(back) == len(chosen) and not self._processes.ends and not in_vain and not self._behind()
        if not kept:
            self._restart()
        return cause, [*lines, KEPT if kept else GONE]

    def _tell_what_happened(
        self, chosen: list[int], answers: dict[int, Answer], places: dict[int, str]
    ) -> tuple["_Cause", list[str]]:
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        behind = self._behind()
        cause = self._find_cause(failures, behind)
        lines = [cause.details] if cause.details else []
        for rank in chosen:
            missed = (
                f", and took no part in {_count_collectives(behind[rank])} that others began" if rank in behind else ""
            )
            if rank == cause.rank:
                continue
            if rank in failures:
                same = failures[rank].details == cause.details
                lines.append(f"rank {rank} failed {'in the same way' if same else 'too: ' + failures[rank].details}")
            elif rank in self._processes.ends:
                lines.append(f"rank {rank} has ended: {self._processes.describe_end(rank)}")
            elif rank in places:
                lines.append(f"rank {rank} {places[rank]}")
            else:
                lines.append(f"rank {rank} had finished the cell{missed}")
        return cause, lines

    def _find_cause(self, failures: dict[int, Failure], behind: dict[int, int]) -> "_Cause":
        """Return the first rank, in rank order, that failed by itself: others fail because they wait for it in vain."""
        own = {rank: failure for rank, failure in failures.items() if not _waited_in_vain(failure)}
        ends = self._processes.ends.keys() - own.keys()
        for rank in sorted(own) or ([] if ends else sorted(failures)):
            return _Cause(rank, failures[rank].summary, failures[rank].details)
        for rank in sorted(ends):
            return _Cause(rank, self._processes.describe_end(rank), self._last_line(rank))
        for rank in sorted(behind):
            return _Cause(rank, f"it took no part in {_count_collectives(behind[rank])} that others began")
        return _Cause(-1, "")  # the cell was interrupted

    def _last_line(self, rank: int) -> str:
        """Return the line of its cell that a rank was at when it ended."""
        file = self._processes.line_file(rank)
        return f"It was at {self._cell} line {int(file.read_text())}." if file.exists() and file.read_text() else ""


class _Cause:
    """The rank that a cell's error is about, and what happened there."""

    def __init__(self, rank: int, summary: str, details: str = "") -> None:
        self.rank, self.summary, self.details = rank, summary, details


def _end_idle(reference: weakref.ref[Ranks]) -> None:
    """End ranks after long without a cell. The timer holds no reference: ranks that nobody has any more end at once."""
    ranks = reference()
    if ranks is not None and ranks._processes is not None:
        ranks._ended_idle = True
        ranks._processes.end_all()


def _waited_in_vain(failure: Failure | None) -> bool:
    return failure is not None and any(words in failure.summary.lower() for words in WAITED_IN_VAIN)


def _count_collectives(count: int) -> str:
    return "a collective" if count == 1 else f"{count} collectives"


def _close_all() -> None:
    for ranks in open_ranks():
        ranks.close()


atexit.register(_close_all)  # before multiprocessing's own function, which would wait for the ranks
