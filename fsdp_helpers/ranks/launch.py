"""Start one process per rank, show progress, return the results, and leave nothing behind.

Workers are importable functions `worker(rank, world_size, *args)`. Their processes are forked from a server that has
torch loaded already, so launches after the first take a fraction of a second.
"""

import math
import pickle
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from multiprocessing.connection import Connection
from typing import Any

from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import follow_edits
from fsdp_helpers.progress import ProgressBar, Report, count_ranks, send_reports_to
from fsdp_helpers.ranks import server
from fsdp_helpers.ranks.errors import Failure, Interrupted, RankError, RankTimeout, shown_by_message
from fsdp_helpers.ranks.group import check_seconds, check_world_size, process_group
from fsdp_helpers.ranks.hangs import HangDetector
from fsdp_helpers.ranks.output import LaunchOutput
from fsdp_helpers.ranks.pickling import check_worker, dumps_named, pickle_job, read_job
from fsdp_helpers.ranks.processes import TERM_S, Processes
from fsdp_helpers.ranks.rank import Send, Setup
from fsdp_helpers.ranks.roll_call import silent_ranks_named
from fsdp_helpers.ranks.stacks import describe

GRACE_S = 0.5  # after a failure: wait this long for the failure that caused it
LOOK_S = 0.5  # at the ranks, for a hang


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
    a file in a private folder, so no port is taken that a different program could want. A worker's output arrives here
    line by line; with several ranks, each line says which one printed it, unless `name_ranks` is False. A rank that
    waits for the others in a collective gives up after `group_timeout_s`, half an hour if it is None, and names those
    that did not answer; on CUDA, setting it makes ranks wait for each collective, without overlap. `progress` may be a
    bar that is drawn already. `start_method` is "forkserver" or "spawn", which loads torch anew.

    Raises ValueError before anything starts (a worker that cannot be imported, an argument that cannot be sent, zero
    ranks, more ranks than CUDA devices), RankError when a rank fails, RankTimeout after `timeout_s` seconds, or once
    all ranks are in the group and none of them has computed or reported anything for `stall_s` seconds, Interrupted, a
    KeyboardInterrupt, after ^C or the stop button, RuntimeError in a script without a main guard. No process outlives
    the call, nor does one that a worker started.
    """
    server.check_not_imported()
    follow_edits()
    with shown_by_message(ValueError):
        check_worker(worker)
        check_world_size(world_size)
        check_seconds(timeout_s=timeout_s, stall_s=stall_s, timeout=group_timeout_s)
        device = choose_device(device, world_size)
        start_method = server.choose_start_method(start_method)
        job = pickle_job(worker, args)
    bar = ProgressBar() if progress is True else progress or None
    with closing(bar) if bar else nullcontext():
        if bar:
            bar.start(
                f"{worker.__name__}, {count_ranks(world_size)} on {device}", server.why_it_takes_long(start_method)
            )
        run = _Launch(world_size, bar, HangDetector(stall_s), name_ranks and world_size > 1)
        try:
            settings = {"payload": job, "timeout_s": group_timeout_s, "streams": 2, "start_method": start_method}
            run.processes = Processes(run_worker, world_size, device, run.write, **settings)
            return run.collect(timeout_s)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted{run.where}; all ranks are stopped") from None
        finally:
            run.end()


def run_worker(rank: int, setup: Setup, send: Send, link: Connection) -> None:
    """Act as one rank of a launch: join the group, run the worker once, and send its result."""
    send_reports_to(lambda report: send("report", report))
    with server.loading_worker():
        worker, args = read_job(setup.payload)
    with (
        process_group(rank, setup.world_size, **setup.group, timeout_s=setup.timeout_s),
        silent_ranks_named(setup.timeout_s),
    ):
        send("in group", None)
        result = worker(rank, setup.world_size, *args)
    send("result", dumps_named(result, f"the result of {worker.__name__!r}"))


class _Launch:
    """The messages of one launch's ranks so far."""

    def __init__(self, world_size: int, bar: ProgressBar | None, hang: HangDetector, names: bool) -> None:
        self.world_size, self.bar, self.hang = world_size, bar, hang
        self.output = LaunchOutput(names)
        self.processes: Processes | None = None
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.in_group: set[int] = set()
        self.where = ""  # how far rank 0 has come, by its last report

    def write(self, rank: int, stream: int, data: bytes) -> None:
        self.hang.moved()
        self.output.add(rank, stream, data)

    @property
    def waiting(self) -> list[int]:
        """Return the ranks whose processes haven't ended."""
        return [rank for rank in range(self.world_size) if rank not in self.processes.ends]

    def collect(self, timeout_s: float | None) -> list:
        """Receive messages until all ranks have ended, one has failed, or time runs out; return the results."""
        until_s = time.monotonic() + (timeout_s or math.inf)
        while waiting := self.waiting:
            left_s = until_s - time.monotonic()
            if left_s <= 0:  # also where a rank never stops sending
                if self.failures:
                    break
                raise self._timeout(f"after {timeout_s} s")
            failed_before = bool(self.failures)
            for message in self.processes.wait(waiting, min(LOOK_S, left_s)):
                self._receive(*message)
            if self.failures and not failed_before:
                until_s = time.monotonic() + GRACE_S
            if not self.failures and self.hang.lasts([self.processes.pids[rank] for rank in waiting]):
                raise self._timeout(f"after {self.hang.stall_s} s in which no rank computed or reported anything")
        if self.failures:
            # The failure that came first: the others fail because of it.
            rank, failure = min(self.failures.items(), key=lambda item: item[1].when_s)
            raise RankError(rank, self.world_size, failure.summary, failure.details)
        return [self.results[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, kind: str, content: Any) -> None:
        self.hang.moved()
        if kind == "in group":
            self.in_group.add(rank)
            if len(self.in_group) == self.world_size:
                self.hang.begin()
                if self.bar is not None:
                    self.bar.running()
        elif kind == "report":
            self._report(rank, content)
        elif kind == "result":
            try:
                self.results[rank] = pickle.loads(content)
            except Exception as error:
                said = f"its result arrived, but can't be read: {type(error).__name__}: {error}"
                self.failures[rank] = Failure(said)
        elif kind == "failure":
            self.failures.setdefault(rank, content)
        elif rank not in self.results and rank not in self.failures:  # it ended: the cause of what the others report
            said = self.processes.describe_end(rank)
            before = " before its worker returned" if "exit status" in said else ""
            self.failures[rank] = Failure(said + before, when_s=-math.inf)

    def _report(self, rank: int, report: Report) -> None:
        if rank == 0:
            self.where = f" at step {report.done} of {report.total}"
        if self.bar is not None:
            self.bar.update(report, rank)

    def _timeout(self, why: str) -> RankTimeout:
        """Make the error that says where each rank was, asking those still running."""
        waiting = self.waiting
        places = [f"rank {rank} {describe(stack)}" for rank, stack in self.processes.stacks(waiting).items()]
        done = self.world_size - len(waiting)
        return RankTimeout(f"{why}, {len(waiting)} of {self.world_size} ranks had not finished ({done} had)", places)

    def end(self) -> None:
        """End all processes, then print their unfinished lines."""
        if self.processes is not None:
            self.processes.end(grace_s=TERM_S, finished=self.results)
            self.output.finish()
