"""Live ranks: processes in one group that run a cell, keep its variables, and wait for the next cell."""

import atexit
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import follow_edits
from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.cells import INTERRUPT, serve
from fsdp_helpers.ranks.errors import Answer, Failure, Interrupted, RankError, shown_by_message
from fsdp_helpers.ranks.group import LONGEST_WAIT_S, check_seconds, check_world_size
from fsdp_helpers.ranks.output import CellOutput
from fsdp_helpers.ranks.processes import Processes
from fsdp_helpers.ranks.roll_call import list_ranks, waited_in_vain
from fsdp_helpers.ranks.server import check_not_a_rank, interrupts_wait

START_S = 300.0  # for all ranks to load what they need and to join
BACK_S = 2.0  # after a failure or Stop, for the other ranks to come back; otherwise the group is restarted
KEPT = "The ranks keep their variables."
GONE = "The ranks were restarted, and their variables are gone."

_open: list[weakref.ref["Ranks"]] = []


def open_ranks() -> list["Ranks"]:
    """Return all open ranks, the most recent ones last."""
    return [ranks for reference in _open if (ranks := reference()) is not None]


def opened_last() -> "Ranks":
    """Return the ranks that `%%ranks` runs on, the ones opened last. Raises RuntimeError if none are open."""
    if not (ranks := open_ranks()):
        raise RuntimeError("no ranks are open; open some first: ranks = Ranks(2)")
    return ranks[-1]


class Ranks:
    """Processes in one group that stay alive between cells.

    Each rank runs the same code in a module of its own, which has `rank`, `world_size` and `device`, and keeps
    everything that the code defines. In a notebook, run `%load_ext fsdp_helpers`, then begin a cell with `%%ranks`, or
    with `%%ranks 0` to run it only on some of the ranks.

        with Ranks(2, device="cpu") as ranks:
            ranks.run("import torch.distributed as dist; print(dist.get_rank())")
            ranks["rank"]

    `device` is "cpu", "cuda" (each rank gets a GPU of its own) or "auto". A collective gives up after `timeout_s`
    seconds (half an hour if it's None); from the first cell that compiles, it gets at least five minutes. The ranks end
    when you call `close()`, at the end of a `with` block, or with this process.

    Raises ValueError, before anything starts, for fewer than one rank, fewer GPUs than ranks, or an unknown device.
    """

    def __init__(self, world_size: int, device: str = "auto", timeout_s: float | None = 20.0) -> None:
        check_not_a_rank()
        with shown_by_message(ValueError):
            check_world_size(world_size)
            check_seconds(timeout_s=timeout_s)
            self.device = choose_device(device, world_size)
        self.world_size, self.timeout_s = world_size, timeout_s or LONGEST_WAIT_S
        self._processes: Processes | None = None
        self._num_cells = 0
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
        with suppress(AttributeError):  # if the arguments were refused, there's nothing to close
            self.close()

    def close(self) -> None:
        """End the ranks; their variables are lost. You can call this more than once."""
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

    def run(self, code: str, ranks: Sequence[int] | None = None, name: str | None = None) -> None:
        """Run `code` on every rank, or on `ranks`; show what it prints and the value of its last line.

        Output is shown once if all ranks agree, else rank by rank. `name` is what tracebacks call the code; by default,
        that's "cell 1" and so on. Raises SyntaxError before anything runs, RankError if a rank fails or dies,
        Interrupted after ^C or Stop, and ValueError for a rank that doesn't exist.
        """
        self._num_cells += 1
        name = name or f"cell {self._num_cells}"
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if wrong := [rank for rank in chosen if rank not in range(self.world_size)]:
            with shown_by_message(ValueError):
                raise ValueError(f"there is no {list_ranks(wrong)}; these ranks are 0 to {self.world_size - 1}")
        compile(code, name, "exec")  # so that code with a syntax error runs on no rank
        self._get_ready()
        output = CellOutput()
        self._processes.on_output = output.add
        try:
            answers = self._ask(chosen, "cell", code, name)
        except KeyboardInterrupt:
            with interrupts_wait():
                output.finish({})
                lines = self._settle(chosen, None)
            raise Interrupted("\n".join(["interrupted", *lines])) from None
        output.finish({rank: answer.value for rank, answer in answers.items()})
        if cause := self._find_cause(name):
            with interrupts_wait():
                lines = self._settle(chosen, cause)
            raise RankError(cause[0], self.world_size, cause[1].summary, "\n".join(lines))

    def __getitem__(self, name: str) -> list:
        """Return a list of this variable's values on all ranks, in rank order.

        Tensors come back detached and on the CPU, a DTensor as a LocalShard, and a value that can't be sent as its
        repr. Raises NameError if a rank has no such variable.
        """
        everyone = range(self.world_size)
        self._get_ready()
        answers = self._ask(everyone, "get", name)
        if missing := [rank for rank in everyone if rank not in answers or not answers[rank].value]:
            with shown_by_message(NameError):
                raise NameError(f"{name!r} is not defined on {list_ranks(missing)}")
        return [answers[rank].value[0] for rank in everyone]

    def _ask(self, ranks: Sequence[int], *message: str) -> dict[int, Answer]:
        """Send a message to these ranks; return their answers by rank. Some are missing if a rank fails."""
        self._processes.tell(ranks, *message)
        self._processes.collect(ranks)
        return self._processes.answers

    # ------------------------------------------------------------ starting and restarting

    def _start(self) -> None:
        """Start new ranks; `_await_start` waits until they have joined."""
        self._counts: dict[int, Mapping] = {}  # per rank: how many collectives of each group it has taken part in
        self._processes = Processes(serve, self.world_size, self.device, CellOutput().add, timeout_s=self.timeout_s)
        self._joining = True

    def _await_start(self) -> None:
        try:
            self._processes.answers_of_all(time.monotonic(), START_S)
        except BaseException:
            self.close()
            raise
        self._joining = False

    def _get_ready(self) -> None:
        """Make sure that ranks can run a cell: if some have ended since the last cell, say so, and start new ones."""
        if self._processes is None:
            raise RuntimeError("these ranks are closed; open new ones: ranks = Ranks(2)")
        follow_edits()
        if self._joining:  # after a restart
            self._await_start()
        self._processes.note_ends()
        if self._processes.ends:
            ends = [f"Rank {rank} had ended: {self._processes.describe_end(rank)}." for rank in self._processes.ends]
            with interrupts_wait():
                self._processes.end()
                self._start()
            print(*ends, GONE, file=sys.stderr)
            self._await_start()

    # ------------------------------------------------------------ after a cell that failed or was interrupted

    def _behind(self) -> dict[int, int]:
        """Return the ranks that are behind others in their group, and by how many collectives; {} if none is."""
        self._counts |= {rank: answer.collectives for rank, answer in self._processes.answers.items() if answer.number}
        most: dict[tuple, int] = {}
        for counts in self._counts.values():
            most |= {group: max(most.get(group, 0), count) for group, count in counts.items()}
        behind = {
            rank: max((most[group] - count for group, count in counts.items()), default=0)
            for rank, counts in self._counts.items()
        }
        return {rank: count for rank, count in behind.items() if count}

    def _find_cause(self, cell: str) -> tuple[int, Failure] | None:
        """Return the rank that failed by itself or missed a collective, and its failure; None if all went well."""
        behind = sorted(self._behind().items())
        self._processes.note_ends()
        rank, failure = self._processes.find_cause() or (-1, None)
        if failure and not failure.details and (line := self._processes.notes.get(rank)):
            failure = replace(failure, details=f"It was at {cell} line {line}.")  # since the rank can't say it anymore
        elif not failure and behind:
            rank, failure = behind[0][0], Failure(f"it {_no_part_in(behind[0][1])}")
        return (rank, failure) if failure else None

    def _settle(self, chosen: list[int], cause: tuple[int, Failure] | None) -> list[str]:
        """Get all ranks ready for the next cell, with a restart if necessary; return lines on what happened to each."""
        answers = dict(self._processes.answers)  # a copy, because more arrive once the ranks are asked to stop
        running = self._processes.missing(chosen)
        found = self._processes.stacks(running)
        for rank in running:
            self._processes.signal(rank, INTERRUPT)
        # A rank in a collective doesn't come back, because the others have left it.
        if not all(map(stacks.is_in_collective, found.values())):
            self._processes.collect(running, time.monotonic() + BACK_S, failed=True)
        at_fault, details = (cause[0], cause[1].details) if cause else (None, "")
        lines = [details] if details else []
        for rank in chosen:
            if rank in found:
                lines.append(f"rank {rank} {stacks.describe(found[rank])}")
            elif rank != at_fault:
                lines.append(f"rank {rank} {self._describe(rank, answers.get(rank), details)}")
        in_vain = any(answer.failure and waited_in_vain(answer.failure.summary) for answer in answers.values())
        is_complete = len(self._processes.answers) == len(chosen) and not self._processes.ends
        kept = is_complete and not in_vain and not self._behind()
        if not kept:
            self._processes.end()
            self._start()
        return [*lines, KEPT if kept else GONE]

    def _describe(self, rank: int, answer: Answer | None, details: str) -> str:
        """Say what happened to a rank that's neither running nor at fault; `details` are from the one at fault."""
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
