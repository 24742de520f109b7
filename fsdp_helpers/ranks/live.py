"""Ranks that stay: processes in one group that run a cell, keep its variables, and wait for the next one."""

import atexit
import math
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch.multiprocessing

from fsdp_helpers.ranks.cells import INTERRUPT, Answer, Failure, Setup, serve, without_addresses
from fsdp_helpers.ranks.group import choose_device
from fsdp_helpers.ranks.launching import stacks
from fsdp_helpers.ranks.launching.errors import Interrupted, RankError, shown_by_message
from fsdp_helpers.ranks.launching.start import (
    check_not_imported,
    choose_start_method,
    environment_changes,
    interrupts_wait,
    ready_to_start,
    server_in_use,
)
from fsdp_helpers.ranks.progress import is_notebook
from fsdp_helpers.ranks.roll_call import WAITED_IN_VAIN, list_ranks

GRACE_S = 0.3  # after a failure: for what the other ranks have to say
BACK_S = 2.0  # after a failure, or Stop: for ranks that are not back; then the group restarts
DRAW_S = 0.1  # between two states of a cell's output
KEPT = "the ranks keep their variables"
GONE = "the ranks were restarted, and their variables are gone"
WAITS = "was waiting in"
START_S = 300.0  # for all ranks to load what they need and to join

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

    `device` is "cpu", "cuda" (each rank gets a GPU of its own) or "auto". A collective gives up after `timeout_s`.
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
        self._number = 0
        self._group: _Group | None = None
        self._start()
        _open.append(weakref.ref(self))

    def __repr__(self) -> str:
        state = "closed" if self._group is None else f"on {self.device}"
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
        with interrupts_wait():
            group, self._group = self._group, None
            if group is not None:
                group.end()

    @property
    def pids(self) -> list[int]:
        return [] if self._group is None else self._group.context.pids()

    @property
    def folder(self) -> str | None:
        """The private folder in which the group meets."""
        return None if self._group is None else self._group.folder

    def run(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Run `code` on every rank, or on `ranks`; show what it prints and the value of its last line.

        The output is shown once where all ranks agree, else rank by rank. Raises SyntaxError before anything runs,
        RankError if a rank fails or dies, Interrupted after ^C or Stop, ValueError for a rank that there is not.
        """
        self._run(code, ranks, f"cell {self._number + 1}")

    def __getitem__(self, name: str) -> list:
        """Return this variable on every rank, in rank order.

        Tensors come detached and on the CPU, a DTensor as a LocalShard, what cannot be sent as its repr. Raises
        NameError if a rank has no such variable.
        """
        group = self._started()
        self._number += 1
        group.tell(self._number, range(self.world_size), "get", name)
        answers = group.collect(self._number, range(self.world_size), _Shown())
        if missing := [rank for rank, (there, _) in answers.items() if not there]:
            with shown_by_message(NameError):
                raise NameError(f"{name!r} is not defined on {list_ranks(missing)}")
        return [pickle.loads(answers[rank][1]) for rank in range(self.world_size)]

    def _started(self) -> "_Group":
        if self._group is None:
            raise RuntimeError("these ranks are closed; open new ones: ranks = Ranks(2)")
        if ends := self._group.note_ends():
            self._restart()
            said = "; ".join(f"rank {rank} had ended ({end})" for rank, end in ends.items())
            print(f"{said}. {GONE.capitalize()}.", file=sys.stderr)
        return self._group

    def _start(self) -> None:
        self._group = _Group(self.world_size, self.device, self.timeout_s)

    def _restart(self) -> None:
        with interrupts_wait():
            self._group.end()
            self._start()

    def _run(self, code: str, ranks: Sequence[int] | None, file: str) -> None:
        chosen = self._choose(ranks)
        compile(code, file, "exec")  # a syntax error runs on no rank
        group = self._started()
        self._number += 1
        with _Shown() as shown:
            try:
                group.tell(self._number, chosen, "cell", (code, file))
                answers = group.collect(self._number, chosen, shown)
            except KeyboardInterrupt:
                with interrupts_wait():
                    kept = self._settle(group, chosen, {}, shown, interrupted=True)[0]
                raise Interrupted(f"interrupted; {KEPT if kept else GONE}") from None
            shown.finish({rank: answers[rank].value for rank in answers})
        if len(answers) < len(chosen) or any(answer.failure for answer in answers.values()) or uneven(answers):
            with interrupts_wait():
                kept, said = self._settle(group, chosen, answers, shown)
            raise _error(group, chosen, answers, said, kept)

    def _settle(
        self, group: "_Group", chosen: list[int], answers: dict[int, Answer], shown: "_Shown", interrupted: bool = False
    ) -> tuple[bool, dict[int, str]]:
        """After a cell that did not end well: have all ranks ready for the next one, restarted if need be.

        Returns whether the variables were kept, and what is known of each rank that had no answer.
        """
        missing = [rank for rank in chosen if rank not in answers]
        said = group.where(missing)
        group.interrupt([rank for rank in missing if group.is_alive(rank)])
        late = (
            {}
            if all(WAITS in words for words in said.values()) and not interrupted
            else group.collect(self._number, missing, shown, BACK_S)
        )
        back = answers | late
        broken = any(_waited_in_vain(answer.failure) for answer in answers.values())
        kept = len(back) == len(chosen) and not broken and not uneven(back)
        if not kept:
            self._restart()
        return kept, said

    def _choose(self, ranks: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if wrong := [rank for rank in chosen if rank not in range(self.world_size)]:
            with shown_by_message(ValueError):
                raise ValueError(f"there is no {list_ranks(wrong)}; these ranks are 0 to {self.world_size - 1}")
        return chosen


def uneven(answers: dict[int, Answer]) -> dict[int, int]:
    """Return by how many collectives ranks are behind the others of a group; {} if all are equal."""
    most: dict[str, int] = {}
    for answer in answers.values():
        for group, (_, count) in answer.collectives.items():
            most[group] = max(most.get(group, 0), count)
    behind = {}
    for rank, answer in answers.items():
        for group, (_, count) in answer.collectives.items():
            if count < most[group]:
                behind[rank] = most[group] - count
    return behind


def _waited_in_vain(failure: Failure | None) -> bool:
    return failure is not None and any(words in failure.summary.lower() for words in WAITED_IN_VAIN)


def _error(
    group: "_Group", chosen: list[int], answers: dict[int, Answer], said: dict[int, str], kept: bool
) -> RankError:
    """Make the error of a cell: the first cause, then the other ranks, then whether their variables are kept."""
    failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
    behind = uneven(answers)
    dead = [rank for rank in said if rank in group.ends]
    if dead:
        first, summary, lines = dead[0], group.ends[dead[0]], []
    elif failures:
        first = min(failures, key=lambda rank: (_waited_in_vain(failures[rank]), rank))
        summary, lines = failures[first].summary, [failures[first].cell_lines]
    else:
        first = min(behind)
        summary = f"it did not take part in {_count_collectives(behind[first])} that others have started in this cell"
        lines = []
    for rank in chosen:
        if rank == first:
            continue
        if rank in failures:
            same = failures[rank].cell_lines == failures[first].cell_lines if first in failures else False
            lines.append(
                f"rank {rank} failed in the same way" if same else f"rank {rank} failed: {failures[rank].cell_lines}"
            )
        elif rank in said:
            lines.append(f"rank {rank} {said[rank]}")
        elif rank in behind and failures:
            lines.append(
                f"rank {rank} had finished the cell, without taking part in {_count_collectives(behind[rank])}"
            )
        else:
            lines.append(f"rank {rank} had finished the cell")
    lines.append(f"{KEPT if kept else GONE}.".capitalize())
    return RankError(first, group.world_size, summary, "\n".join(lines))


def _count_collectives(count: int) -> str:
    return "a collective" if count == 1 else f"{count} collectives"


class _Group:
    """The processes of one group, as the parent sees them."""

    def __init__(self, world_size: int, device: str, timeout_s: float) -> None:
        self.world_size = world_size
        self.ends: dict[int, str] = {}  # of ranks that have ended
        self.folder = tempfile.mkdtemp(prefix="fsdp_helpers-")
        self._setup = Setup(world_size, device, timeout_s, self.folder, environment_changes())
        self._exits = ExitStack()
        self._exits.enter_context(server_in_use())
        pairs = [multiprocessing.connection.Pipe() for _ in range(world_size)]
        pipes = [multiprocessing.connection.Pipe(duplex=False) for _ in range(world_size)]
        self._links, theirs = zip(*pairs, strict=True)
        self._outputs, their_outputs = zip(*pipes, strict=True)
        for output in self._outputs:
            os.set_blocking(output.fileno(), False)
        self.context = None
        try:
            start_method = choose_start_method(None)
            arguments = (self._setup, list(theirs), list(their_outputs))
            with interrupts_wait(), ready_to_start(start_method, device):
                self.context = torch.multiprocessing.start_processes(
                    serve, arguments, world_size, join=False, start_method=start_method
                )
            for connection in (*theirs, *their_outputs):
                connection.close()
            with _Shown() as shown:
                if len(self.collect(0, range(world_size), shown, START_S)) < world_size:
                    raise self._start_error()
        except BaseException:
            self.end()
            raise

    def _start_error(self) -> Exception:
        """Make the error of ranks that did not come; torch keeps the traceback of each that failed in a file."""
        for rank, file in enumerate(self.context.error_files):
            if os.path.exists(file):
                details = pickle.loads(Path(file).read_bytes())
                return RankError(rank, self.world_size, details.strip().splitlines()[-1], details.rstrip())
        if self.ends:
            return RankError(min(self.ends), self.world_size, self.ends[min(self.ends)])
        return TimeoutError(f"the ranks did not start within {START_S:.0f} s")

    def tell(self, number: int, ranks: Iterable[int], kind: str, content: Any) -> None:
        for rank in ranks:
            with suppress(OSError):  # it has just ended, as `collect` will see
                self._links[rank].send((number, kind, content))

    def collect(
        self, number: int, ranks: Iterable[int], shown: "_Shown", limit_s: float | None = None
    ) -> dict[int, Any]:
        """Return the answers to a message; soon after one failure or death, those that there are."""
        answers: dict[int, Any] = {}
        until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        failed = limit_s is not None
        while waiting := [rank for rank in ranks if rank not in answers and rank not in self.ends]:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            sentinels = [self.context.processes[rank].sentinel for rank in waiting]
            links = [self._links[rank] for rank in waiting]
            ready = multiprocessing.connection.wait([*links, *sentinels, *self._open_outputs()], min(left_s, 3600.0))
            self._read_outputs(shown)
            for rank, link, sentinel in zip(waiting, links, sentinels, strict=True):
                if link in ready:
                    self._receive(number, rank, answers)
                elif sentinel in ready:
                    self.ends[rank] = describe_end(self.context.processes[rank])
                ended_badly = rank in self.ends or isinstance(answers.get(rank), Answer) and answers[rank].failure
                if ended_badly and not failed:
                    failed, until_s = True, time.monotonic() + GRACE_S
        self._read_outputs(shown)
        return answers

    def _receive(self, number: int, rank: int, answers: dict[int, Any]) -> None:
        try:
            answered, content = self._links[rank].recv()
        except (EOFError, OSError):
            process = self.context.processes[rank]
            process.join(GRACE_S)
            self.ends[rank] = describe_end(process)
            return
        if answered == number:  # else of a cell that was interrupted
            answers[rank] = content

    def _open_outputs(self) -> list:
        return [output for output in self._outputs if not output.closed]

    def _read_outputs(self, shown: "_Shown") -> None:
        for rank, output in enumerate(self._outputs):
            while not output.closed:
                try:
                    data = os.read(output.fileno(), 65536)
                except BlockingIOError:
                    break
                if not data:
                    output.close()
                shown.add(rank, data)

    def is_alive(self, rank: int) -> bool:
        return self.context.processes[rank].is_alive()

    def note_ends(self) -> dict[int, str]:
        """Return how ranks ended that are gone."""
        for rank in range(self.world_size):
            if rank not in self.ends and not self.is_alive(rank):
                self.ends[rank] = describe_end(self.context.processes[rank])
        return self.ends

    def where(self, ranks: list[int]) -> dict[int, str]:
        """Return where each of these ranks is, or how it ended."""
        files = {rank: self._setup.stack_file(rank) for rank in ranks if self.is_alive(rank)}
        stacks.ask({self.context.processes[rank].pid: file for rank, file in files.items()})
        return {rank: stacks.describe(files[rank]) if rank in files else self.note_ends()[rank] for rank in ranks}

    def interrupt(self, ranks: list[int]) -> None:
        for rank in ranks:
            if INTERRUPT is not None:
                os.kill(self.context.processes[rank].pid, INTERRUPT)

    def end(self) -> None:
        """End all processes at once, and all that they hold."""
        processes = self.context.processes if self.context is not None else []
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()
            process.close()
        for connection in (*self._links, *self._outputs):
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._exits.close()


def describe_end(process: Any) -> str:
    process.join(GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        return f"the process was ended by {name}"
    return f"the process left with exit status {code}"


class _Shown:
    """What a cell shows: line by line while it runs, in a notebook; at the end once for ranks that agree."""

    def __init__(self) -> None:
        self._bytes: dict[int, bytes] = {}
        self._handle: Any = None
        self._drawn_s = -math.inf

    def __enter__(self) -> "_Shown":
        return self

    def __exit__(self, *_: object) -> None:
        """Show what there is, if `finish` was not called: the cell was interrupted."""
        if self._bytes is not None and any(self._bytes.values()):
            self.finish({})

    @property
    def text(self) -> str:
        return merge(self._texts())

    def _texts(self) -> dict[int, str]:
        return {
            rank: without_addresses(data.decode("utf-8", "replace")).rstrip("\n")
            for rank, data in sorted(self._bytes.items())
        }

    def add(self, rank: int, data: bytes) -> None:
        self._bytes[rank] = self._bytes.get(rank, b"") + data
        if data and is_notebook() and time.monotonic() - self._drawn_s > DRAW_S:
            self._drawn_s = time.monotonic()
            self._show(self.text)

    def finish(self, values: dict[int, str | None]) -> None:
        """Show everything for good: what was printed, then the values of the last line."""
        texts = self._texts()
        ranks = sorted(values.keys() | texts.keys())
        printed = merge({rank: texts.get(rank, "") for rank in ranks})
        shown = merge({rank: values.get(rank) or "" for rank in ranks})
        if text := "\n".join(filter(None, [printed, shown])):
            if is_notebook():
                self._show(text)
            else:
                print(text, flush=True)
        self._bytes = {}

    def _show(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def merge(texts: dict[int, str]) -> str:
    """Return the text of all ranks: once if they agree, else rank by rank, each under its name."""
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    parts = []
    for text in dict.fromkeys(texts.values()):
        if text:
            name = f"{list_ranks([rank for rank in texts if texts[rank] == text])}: "
            parts.append(name + text.replace("\n", "\n" + " " * len(name)))
    return "\n".join(parts)


def _close_all() -> None:
    for ranks in open_ranks():
        ranks.close()


atexit.register(_close_all)  # before multiprocessing's own function, which would wait for the ranks
