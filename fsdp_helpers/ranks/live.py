"""The `%%ranks` magic, and live ranks, which run a cell, keep its variables, and wait for the next cell."""

import atexit
import os
import re
import symtable
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from fsdp_helpers.config import require_positive_int, require_seconds
from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import InPlace, follow_edits, is_notebook, shown_by_message
from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.cells import INTERRUPT, serve, without_addresses
from fsdp_helpers.ranks.errors import Answer, Failure, Interrupted, RankError, list_ranks
from fsdp_helpers.ranks.group import LONGEST_WAIT_S, blames_another_rank
from fsdp_helpers.ranks.processes import Processes
from fsdp_helpers.ranks.server import check_not_a_rank, interrupts_wait

BACK_S = 2.0  # after a failure or Stop, for the other ranks to come back; otherwise the group is restarted
DRAW_S = 0.1  # between two updates of a cell's output
MISSED = "didn't take part in a collective that others began"
UNDEFINED = re.compile(r"NameError: name '(\w+)' is not defined")
KEPT = "The ranks keep their variables."
AGAIN = "run the `%%ranks` cells above this one again (Run > Run All Above Selected Cell)."
GONE = f"The ranks were restarted, and their variables are gone: {AGAIN}"
# Under a trace, torch says that it didn't see memory being allocated that is freed now; the trace counts that itself.
EARLIER_MEMORY = re.compile(r"(\[rank\d+\]:)?\[W.*Memory block of unknown size.*\n?")
LOST = "These ranks {}: " + AGAIN


class Ranks(AbstractContextManager):
    """Processes in one group that stay alive between cells.

    Each rank runs the same code in its own module, which has `rank`, `world_size` and `device`, and keeps
    everything that the code defines. In a notebook, run `%load_ext fsdp_helpers`, then begin a cell with `%%ranks`, or
    with `%%ranks 0` to run it only on some of the ranks.

        with Ranks(2, device="cpu") as ranks:
            ranks.run("import torch.distributed as dist; print(dist.get_rank())")
            ranks["rank"]

    `device` is "cpu", "cuda" (each rank gets its own GPU) or "auto". A collective gives up after `timeout_s`
    seconds (half an hour if it's None); from the first cell that compiles, it gets at least five minutes. The ranks
    exit when you call `close()`, at the end of a `with` block, or when this process exits.

    Before anything starts, raises ValueError for fewer than one rank, fewer GPUs than ranks, or an unknown device.
    """

    _processes: Processes | None = None  # while these ranks are open

    def __init__(self, world_size: int, device: str = "auto", timeout_s: float | None = 20.0) -> None:
        check_not_a_rank()
        with shown_by_message(ValueError):
            require_positive_int("world_size", world_size)
            require_seconds(timeout_s=timeout_s)
            self.device = choose_device(device, world_size)
        self.world_size, self.timeout_s = world_size, timeout_s or LONGEST_WAIT_S
        self._num_cells = 0
        self._lost = dict.fromkeys(_defined, "are new")  # names that these ranks don't have, and why
        self._start()
        try:
            self._processes.tell(range(world_size), "get", "rank")
            self._processes.answers_of_all()  # once all have joined
        except BaseException:
            self.close()
            raise
        _all[id(self)] = self

    def __repr__(self) -> str:
        state = "closed" if self._processes is None else f"on {self.device}"
        return f"Ranks({self.world_size}, {state})"

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the ranks; their variables are lost. You can call this more than once."""
        if self._processes is not None:
            self._processes.end()
            self._processes = None

    __del__ = close

    @property
    def pids(self) -> list[int]:
        """Return the process ID of each rank."""
        return [] if self._processes is None else self._processes.pids

    def run(self, code: str, ranks: Iterable[int] | None = None, name: str | None = None, tracer: Any = None) -> None:
        """Run `code` on every rank, or on `ranks`; show what it prints and the value of its last line.

        Output is shown only once if all ranks agree, otherwise rank by rank. `name` is what tracebacks call the code;
        by default, that's "cell 1" and so on. `tracer` is what each rank enters around the code, and a function that
        gets what they have sent, by rank, even if the code fails. Raises SyntaxError before anything runs, RankError if
        a rank fails or dies, Interrupted after ^C or Stop, and ValueError for a rank that doesn't exist.
        """
        self._num_cells += 1
        name = name or f"cell {self._num_cells}"
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if wrong := [rank for rank in chosen if rank not in range(self.world_size)]:
            with shown_by_message(ValueError):
                raise ValueError(f"there is no {list_ranks(wrong)}; these ranks are 0 to {self.world_size - 1}")
        compile(code, name, "exec")  # so that code with a syntax error runs on no rank
        record, show = tracer or (None, None)
        processes = self._processes
        try:
            self._ask(chosen, "cell", code, name, record)
        finally:
            if show and processes and processes.traced:
                show({rank: processes.traced.get(rank, []) for rank in chosen})
        self._lost = {lost: cell for lost, cell in self._lost.items() if lost not in names_in(code)}
        _defined.update(names_in(code))

    def __getitem__(self, name: str) -> list:
        """Return a list of this variable's values on all ranks, in rank order.

        Tensors come back detached and on the CPU. A DTensor comes back as a LocalShard, and a value that can't be sent
        comes back as its repr. Raises NameError if a rank has no such variable, and the same errors as `run`.
        """
        answers = self._ask(range(self.world_size), "get", name)
        if missing := [rank for rank, answer in answers.items() if not answer.value]:
            with shown_by_message(NameError):
                hint = f". {LOST.format(self._lost[name])}" if name in self._lost else ""
                raise NameError(f"{name!r} is not defined on {list_ranks(missing)}{hint}")
        return [answers[rank].value[0] for rank in range(self.world_size)]

    def _start(self) -> None:
        """Start new ranks, which join their group before they read messages."""
        self._counts: dict[int, Mapping] = {}  # per rank: how many collectives of each group it has taken part in
        body = partial(serve, self.timeout_s)
        self._processes = Processes(body, self.world_size, self.device, CellOutput(range(self.world_size)).add)

    # ------------------------------------------------------------ a message and its answers

    def _ask(self, chosen: Sequence[int], kind: str, *content: Any) -> dict[int, Answer]:
        """Send a message to these ranks, show what they print, and return their answers."""
        if self._processes is None:
            raise RuntimeError("these ranks are closed; open new ones: ranks = Ranks(2)")
        follow_edits()
        code, cell = content[:2] if kind == "cell" else ("", f"ranks[{content[0]!r}]")
        output = CellOutput(chosen)
        self._processes.on_output = output.add
        try:
            self._processes.tell(chosen, kind, *content)
            self._processes.collect(chosen)
        except KeyboardInterrupt:
            lines = self._settle(chosen, names_in(code), cell)
            output.finish({})
            raise Interrupted("\n".join(["interrupted", *lines])) from None
        answers = dict(sorted(self._processes.answers.items()))
        output.finish({rank: answer.value for rank, answer in answers.items()} if kind == "cell" else {})
        if cause := self._find_cause(cell):
            rank, failure = cause
            lines = self._settle(chosen, names_in(code), cell, rank, failure.details)
            if (missing := UNDEFINED.match(failure.summary)) and missing[1] in self._lost and lines[-1] == KEPT:
                lines[-1] = LOST.format(self._lost[missing[1]])
            raise RankError(rank, self.world_size, failure.summary, "\n".join(lines))
        return answers

    def _find_cause(self, cell: str) -> tuple[int, Failure] | None:
        """Return the rank that failed on its own or missed a collective, and its failure; None if all went well."""
        if cause := self._processes.find_cause():
            rank, failure = cause
            if not failure.details and (line := self._processes.notes.get(rank)):  # it can't report it anymore
                failure = Failure(failure.summary, f"It was at {cell} line {line}.")
            return rank, failure
        return next(((rank, Failure(f"it {MISSED}")) for rank in self._behind()), None)

    def _behind(self) -> list[int]:
        """Return the ranks that have taken part in fewer collectives than others in their group."""
        self._counts |= {rank: answer.collectives for rank, answer in self._processes.answers.items() if answer.number}
        most: Counter = Counter()
        for counts in self._counts.values():
            most |= counts  # the higher count of each group
        return [
            rank
            for rank, counts in sorted(self._counts.items())
            if any(most[group] > count for group, count in counts.items())
        ]

    @interrupts_wait()
    def _settle(
        self, chosen: Sequence[int], names: set[str], cell: str, at_fault: int | None = None, details: str = ""
    ) -> list[str]:
        """Get all ranks ready for the next cell, restarting them if necessary; return lines saying what happened.

        `names` are those that the failed cell would have defined, which are lost in a restart as well. The first lines
        are the `details` of the failure on rank `at_fault`.
        """
        processes, answers = self._processes, dict(self._processes.answers)  # a copy, because more will arrive
        found = processes.stacks(processes.missing(chosen))
        for rank in found:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], INTERRUPT)
        # A rank in a collective doesn't come back, because the others have left it.
        if not all(map(stacks.is_in_collective, found.values())):
            processes.collect(list(found), time.monotonic() + BACK_S, grace_s=BACK_S)
        lines, behind = [details] if details else [], self._behind()
        for rank in chosen:
            if rank in found:
                where = stacks.describe(found[rank])
            elif rank not in answers:
                where = f"has ended: {processes.describe_end(rank)}"
            elif failure := answers[rank].failure:
                where = "failed in the same way" if failure.details == details else f"failed too: {failure.details}"
            else:
                where = "had finished the cell" + (f", and {MISSED}" if rank in behind else "")
            if rank != at_fault:
                lines.append(f"rank {rank} {where}")
        broken = any(answer.failure and blames_another_rank(answer.failure.summary) for answer in answers.values())
        kept = len(processes.answers) == len(chosen) and not (processes.ends or broken or behind)
        if not kept:
            processes.end()
            self._start()
            self._lost = dict.fromkeys(_defined | names, f"were restarted after {cell} failed")
        return [*lines, KEPT if kept else GONE]


def names_in(code: str) -> set[str]:
    """Return the names that the code assigns, imports or defines at its top level."""
    symbols = symtable.symtable(code, "", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


_defined: set[str] = set()  # the names that cells have defined, on any ranks
_all: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()  # in the order in which they were opened


def open_ranks() -> list[Ranks]:
    """Return all open ranks, the most recent ones last."""
    return [ranks for ranks in _all.values() if ranks.pids]


@atexit.register  # before multiprocessing's own function, which would wait for the ranks
def close_all() -> None:
    for ranks in open_ranks():
        ranks.close()


# ---------------------------------------------------------------- the output of a cell


class CellOutput:
    """Shows the output of one cell on `ranks`: in a notebook, line by line while it runs; elsewhere, once it's done."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._printed = dict.fromkeys(ranks, b"")
        self._page = InPlace() if is_notebook() else None
        self._drawn_s, self._is_drawn = 0.0, True

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Receive output that a rank has printed; b"" if there hasn't been any for a while."""
        self._printed[rank] = self._printed.get(rank, b"") + data
        self._is_drawn &= not data
        if self._page is not None and not self._is_drawn and time.monotonic() - self._drawn_s > DRAW_S:
            self._drawn_s, self._is_drawn = time.monotonic(), True
            self._page.show(self._text({}))

    def finish(self, values: Mapping[int, str | None]) -> None:
        """Show the final output: everything the ranks printed, then the `values` of the cell's last line."""
        if text := self._text(values):
            if self._page is not None:
                self._page.show(text)
            else:
                print(text, flush=True)

    def _text(self, values: Mapping[int, str | None]) -> str:
        texts = {rank: data.decode("utf-8", "replace") for rank, data in self._printed.items()}
        printed = {rank: EARLIER_MEMORY.sub("", text).rstrip("\n") for rank, text in texts.items()}
        shown = {rank: values.get(rank) or "" for rank in printed}
        return "\n".join(filter(None, [merge(printed), merge(shown)]))


def merge(texts: Mapping[int, str]) -> str:
    """Merge the ranks' texts into one copy if they agree; otherwise, list them one by one with the ranks' names."""
    texts = {rank: without_addresses(text) for rank, text in texts.items()}
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    parts = []
    for text in filter(None, dict.fromkeys(texts.values())):
        name = f"{list_ranks([rank for rank in texts if texts[rank] == text])}: "
        parts.append(name + text.replace("\n", "\n" + " " * len(name)))
    return "\n".join(parts)


# ---------------------------------------------------------------- the magic


def run_cell(line: str, cell: str, tracer: Any) -> None:
    """Run a cell that begins with `%%ranks`; `line` has the rest of that line, perhaps with --trace."""
    from IPython import get_ipython
    from IPython.core.error import UsageError

    numbers = re.sub(r"(?<!\S)--trace(?!\S)", "", line)
    if not re.fullmatch(r"\s*(\d+\s*(,\s*\d+\s*)*)?", numbers):
        raise UsageError(
            f"%%ranks {line}: give rank numbers, as in %%ranks 0 or %%ranks 1,2, or nothing for all; the only option is --trace"
        )
    chosen = [int(number) for number in numbers.split(",")] if numbers.strip() else None
    if not (opened := open_ranks()):
        raise RuntimeError("no ranks are open; open some first: ranks = Ranks(2)")
    try:
        # The magic is the cell's first line.
        opened[-1].run(f"\n{cell}", chosen, f"Cell In[{len(get_ipython().user_ns['In']) - 1}]", tracer)
    except SyntaxError as error:  # for which IPython would show our own lines, too
        refusal = RuntimeError("".join(traceback.format_exception_only(error)).rstrip())
        refusal._render_traceback_ = lambda: [str(refusal)]  # type: ignore[attr-defined]
        raise refusal from None
