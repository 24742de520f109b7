"""Start one process per rank, show progress, return the results, and leave nothing behind.

Workers are importable functions `worker(rank, world_size, *args)`. Their processes are forked from a server that has
torch loaded already (`forkserver`), so launches after the first take a fraction of a second. The server holds
third-party modules only: an edit to `fsdp_helpers` or to your own module takes effect from the next launch on.
"""

import math
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdp_helpers.ranks.edited_modules import follow_edits
from fsdp_helpers.ranks.errors import Interrupted, RankError, RankTimeout, shown_by_message
from fsdp_helpers.ranks.group import check_timeout, choose_device
from fsdp_helpers.ranks.hangs import HangDetector
from fsdp_helpers.ranks.pickling import check_worker, pickle_job
from fsdp_helpers.ranks.processes import LONGEST_WAIT_S, TERM_S, Processes
from fsdp_helpers.ranks.progress import ProgressBar, count_ranks
from fsdp_helpers.ranks.rank import STREAMS, Failure
from fsdp_helpers.ranks.roll_call import list_ranks
from fsdp_helpers.ranks.server import (
    check_not_imported,
    choose_start_method,
    interrupts_wait,
    why_it_takes_long,
)
from fsdp_helpers.ranks.worker import run_worker

GRACE_S = 0.5  # after a failure: wait this long for the failure that caused it


def launch(
    worker: Callable,
    *args: Any,
    world_size: int,
    device: str = "auto",
    timeout_s: float | None = None,
    stall_s: float | None = None,
    group_timeout_s: float | None = None,
    progress: bool | ProgressBar = True,
    start_method: str | None = None,
    name_ranks: bool = True,
) -> list:
    """Run `worker(rank, world_size, *args)` in `world_size` processes and return their results in rank order.

    Each worker runs in a process group: gloo on the CPU, nccl with one device per rank on CUDA. The ranks meet through
    a file in a private folder, so no port is taken that a different program could want. What a worker prints arrives
    here line by line; with several ranks, each line says which one printed it, unless `name_ranks` is False. A rank
    that waits for the others in a collective gives up after `group_timeout_s`, half an hour if it is None, and names
    those that did not answer; on CUDA, setting it makes ranks wait for each collective, without overlap. `progress` may
    be a bar that is drawn already. `start_method` is "forkserver" or, failing that, "spawn", which loads torch anew.

    Raises ValueError before anything starts (a worker that cannot be imported, an argument that cannot be sent, zero
    ranks, more ranks than CUDA devices), RankError when a rank fails, RankTimeout after `timeout_s` seconds, or once
    all ranks are in the group and none of them has computed or reported anything for `stall_s` seconds, Interrupted, a
    KeyboardInterrupt, after ^C or the stop button, RuntimeError in a script without a main guard. No process outlives
    the call, nor does one that a worker started.
    """
    check_not_imported()
    follow_edits()
    with shown_by_message(ValueError):
        check_worker(worker)
        _check_numbers(world_size, timeout_s=timeout_s, stall_s=stall_s)
        check_timeout(group_timeout_s)
        device = choose_device(device, world_size)
        start_method = choose_start_method(start_method)
        payload = pickle_job(worker, args)
    bar = ProgressBar() if isinstance(progress, bool) else progress
    output = _Output(bar, draws=progress is not False, names=name_ranks and world_size > 1)
    output.start(f"{worker.__name__}, {count_ranks(world_size)} on {device}", why_it_takes_long(start_method))
    run = _Launch(world_size, output)
    try:
        run.processes = Processes(
            run_worker,
            world_size,
            device,
            output.write,
            payload=(payload, output.draws and bar.wants_all_ranks),
            timeout_s=group_timeout_s,
            streams=2,
            start_method=start_method,
        )
        run.collect(timeout_s, HangDetector(stall_s))
        return run.read_results()
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted{output.where}; all ranks are stopped") from None
    finally:
        bar.close()
        with interrupts_wait():
            run.end()


def _check_numbers(world_size: int, **limits_s: float | None) -> None:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it must be a whole number, 1 or more")
    for name, limit_s in limits_s.items():
        is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
        if limit_s is not None and not (is_number and 0 < limit_s < math.inf):
            raise ValueError(f"{name} is {limit_s!r}; it must be a number of seconds above 0, or None to wait forever")


@dataclass
class _Output:
    """The place where the ranks' lines and reports go."""

    bar: ProgressBar
    draws: bool
    names: bool
    where: str = ""  # how far rank 0 has come, by its last report
    num_writes: int = 0
    unfinished: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by rank and stream

    def start(self, what: str, why: str) -> None:
        if self.draws:
            self.bar.start(what, why)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Print the lines that are complete now; the rest of a line waits for its end."""
        self.num_writes += 1
        *lines, self.unfinished[rank, stream] = (self.unfinished.get((rank, stream), b"") + data).split(b"\n")
        for line in lines:
            self.line(rank, stream, line)

    def write_rest(self) -> None:
        for (rank, stream), line in self.unfinished.items():
            if line:
                self.line(rank, stream, line)

    def line(self, rank: int, stream: int, line: bytes) -> None:
        name = f"[rank {rank}] " if self.names else ""
        text = line.decode("utf-8", "replace")
        self.bar.print(name + text if text else name.rstrip(), getattr(sys, STREAMS[stream]))

    def report(self, rank: int, done: int, total: int, *said: Any) -> None:
        if rank == 0:
            self.where = f" at step {done} of {total}"
        if not self.draws:
            return
        if self.bar.wants_all_ranks:
            self.bar.update(rank, done, total, *said)
        else:
            self.bar.update(done, total, *said)


class _Launch:
    """What the ranks of one launch have said so far."""

    def __init__(self, world_size: int, output: _Output) -> None:
        self.world_size, self.output = world_size, output
        self.processes: Processes | None = None
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.in_group: set[int] = set()

    @property
    def waiting(self) -> list[int]:
        """The ranks whose processes have not ended."""
        return [rank for rank in range(self.world_size) if rank not in self.processes.ends]

    def collect(self, timeout_s: float | None, hang: HangDetector) -> None:
        """Receive what ranks send until all have ended, or one has failed, or their time is up."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting := self.waiting:
            left_s = LONGEST_WAIT_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            failed_before = bool(self.failures)
            num_writes = self.output.num_writes
            messages = self.processes.wait(waiting, hang.shorten(left_s))
            for message in messages:
                self._receive(*message)
            if all_in_group := len(self.in_group) == self.world_size:
                self.output.bar.running()
            if not failed_before and self.failures:
                deadline_s = time.monotonic() + GRACE_S
            elif deadline_s is not None and time.monotonic() >= deadline_s:  # also where a rank never stops sending
                if failed_before:
                    break
                if self.waiting:
                    raise self._timeout(f"after {timeout_s} s")
            elif messages or not all_in_group or self.output.num_writes > num_writes:
                hang.moved()
            elif not failed_before and hang.lasts([self.processes.pids[rank] for rank in waiting]):
                raise self._timeout(f"after {hang.stall_s} s in which no rank computed or reported anything")
        if self.failures:
            self._raise_first()

    def _receive(self, rank: int, kind: str, content: Any) -> None:
        if kind == "in group":
            self.in_group.add(rank)
        elif kind == "progress":
            self.output.report(rank, *content)
        elif kind == "result":
            self.results[rank] = content
        elif kind == "failure":
            self.failures.setdefault(rank, content)
        elif rank not in self.results and rank not in self.failures:
            self.failures[rank] = self._describe_end(rank)

    def _describe_end(self, rank: int) -> Failure:
        """Describe a rank that ended without a message: it is the cause of whatever the others report."""
        if details := self.processes.own_traceback(rank):
            return Failure(float("-inf"), details.splitlines()[-1], details)
        said = self.processes.describe_end(rank)
        before = " before its worker returned" if "exit status" in said else ""
        return Failure(float("-inf"), said + before, aborted=said.endswith("SIGABRT"))

    def _raise_first(self) -> None:
        """Raise the failure that came first: the others fail because of it."""
        rank = min(self.failures, key=lambda rank: self.failures[rank].when_s)
        failure = self.failures[rank]
        silent = self._who_is_silent() if failure.aborted else ""
        raise RankError(rank, self.world_size, failure.summary + silent, failure.details)

    def _who_is_silent(self) -> str:
        """Name the ranks that live but do not answer after an abort; the rank that aborted may have waited for them."""
        running = [rank for rank in self.waiting if self.processes.is_alive(rank)]
        self.processes.ask_where(running)
        silent = [rank for rank in running if not self.processes.has_answered(rank)]
        return f", and {list_ranks(silent)} did not answer: stopped or stuck, and waited for in vain?" if silent else ""

    def _timeout(self, why: str) -> RankTimeout:
        """Make the error that says where each rank was, asking those that still run."""
        waiting = self.waiting
        self.processes.ask_where(waiting)
        places = [f"rank {rank} {self.processes.where(rank)}" for rank in waiting]
        done = self.world_size - len(waiting)
        return RankTimeout(f"{why}, {len(waiting)} of {self.world_size} ranks had not finished ({done} had)", places)

    def read_results(self) -> list:
        results = []
        for rank in range(self.world_size):
            try:
                results.append(pickle.loads(self.results[rank]))
            except Exception as error:
                said = f"its result arrived and cannot be read: {type(error).__name__}: {error}"
                raise RankError(rank, self.world_size, said) from error
        return results

    def end(self) -> None:
        if self.processes is not None:
            self.processes.end(grace_s=TERM_S, finished=self.results)
            self.output.write_rest()
