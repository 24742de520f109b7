"""Start one process per rank, show progress, return the results, and leave nothing behind.

Workers are importable functions `worker(rank, world_size, *args)`. Their processes are forked from a server that has
torch loaded already, so launches after the first take a fraction of a second.
"""

import math
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fsdp_helpers.gpus import choose_device
from fsdp_helpers.notebook import follow_edits
from fsdp_helpers.progress import ProgressBar, Report, count_ranks, print_above_bar, send_reports_to
from fsdp_helpers.ranks import server
from fsdp_helpers.ranks.errors import Interrupted, RankError, RankTimeout, shown_by_message
from fsdp_helpers.ranks.group import check_seconds, check_world_size, process_group
from fsdp_helpers.ranks.hangs import HangDetector
from fsdp_helpers.ranks.pickling import check_worker, pickle_job, pickle_result, read_job
from fsdp_helpers.ranks.processes import TERM_S, Processes
from fsdp_helpers.ranks.rank import STREAMS, Failure, Send, Setup, failures_sent
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
    a file in a private folder, so no port is taken that a different program could want. What a worker prints arrives
    here line by line; with several ranks, each line says which one printed it, unless `name_ranks` is False. A rank
    that waits for the others in a collective gives up after `group_timeout_s`, half an hour if it is None, and names
    those that did not answer; on CUDA, setting it makes ranks wait for each collective, without overlap. `progress` may
    be a bar that is drawn already. `start_method` is "forkserver" or "spawn", which loads torch anew.

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
    run = _Launch(world_size, bar, name_ranks and world_size > 1)
    if bar is not None:
        bar.start(f"{worker.__name__}, {count_ranks(world_size)} on {device}", server.why_it_takes_long(start_method))
    try:
        settings = {"payload": job, "timeout_s": group_timeout_s, "streams": 2, "start_method": start_method}
        run.processes = Processes(run_worker, world_size, device, run.write, **settings)
        run.collect(timeout_s, HangDetector(stall_s))
        return run.read_results()
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted{run.where}; all ranks are stopped") from None
    finally:
        if bar is not None:
            bar.close()
        with server.interrupts_wait():
            run.end()


def run_worker(rank: int, setup: Setup, send: Send, link: Connection) -> None:
    """Act as one rank of a launch: join the group, run the worker once, and send its result, or its failure."""
    send_reports_to(lambda report: send("report", report))
    with server.loading_worker():
        worker, args = read_job(setup.payload)
    with (
        process_group(rank, setup.world_size, **setup.group, timeout_s=setup.timeout_s),
        failures_sent(send),  # at once: when the group ends, the other ranks fail too
        silent_ranks_named(setup.timeout_s),
    ):
        send("in group", None)
        result = worker(rank, setup.world_size, *args)
    send("result", pickle_result(worker, result))


class _Launch:
    """The messages of one launch's ranks so far."""

    def __init__(self, world_size: int, bar: ProgressBar | None, names: bool) -> None:
        self.world_size, self.bar, self.names = world_size, bar, names
        self.processes: Processes | None = None
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.in_group: set[int] = set()
        self.where = ""  # how far rank 0 has come, by its last report
        self.unfinished: dict[tuple[int, int], bytes] = {}  # the beginning of a line, by rank and stream
        self.num_writes = 0

    @property
    def waiting(self) -> list[int]:
        """Return the ranks whose processes haven't ended."""
        return [rank for rank in range(self.world_size) if rank not in self.processes.ends]

    def collect(self, timeout_s: float | None, hang: HangDetector) -> None:
        """Receive messages from the ranks until all have ended, one has failed, or time runs out."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while waiting := self.waiting:
            failed_before, num_writes = bool(self.failures), self.num_writes
            messages = self.processes.wait(waiting, min(LOOK_S, max(0.0, until_s - time.monotonic())))
            for message in messages:
                self._receive(*message)
            if self.failures and not failed_before:
                until_s = time.monotonic() + GRACE_S
            elif time.monotonic() >= until_s:  # also where a rank never stops sending
                if self.failures:
                    break
                if self.waiting:
                    raise self._timeout(f"after {timeout_s} s")
            elif messages or self.num_writes > num_writes or len(self.in_group) < self.world_size:
                hang.moved()
            elif not self.failures and hang.lasts([self.processes.pids[rank] for rank in waiting]):
                raise self._timeout(f"after {hang.stall_s} s in which no rank computed or reported anything")
        if self.failures:
            # The failure that came first: the others fail because of it.
            rank = min(self.failures, key=lambda rank: self.failures[rank].when_s)
            raise RankError(rank, self.world_size, self.failures[rank].summary, self.failures[rank].details)

    def _receive(self, rank: int, kind: str, content: Any) -> None:
        if kind == "in group":
            self.in_group.add(rank)
            if self.bar is not None and len(self.in_group) == self.world_size:
                self.bar.running()
        elif kind == "report":
            self._report(rank, content)
        elif kind == "result":
            self.results[rank] = content
        elif kind == "failure":
            self.failures.setdefault(rank, content)
        elif rank not in self.results and rank not in self.failures:  # it ended: the cause of what the others report
            said = self.processes.describe_end(rank)
            before = " before its worker returned" if "exit status" in said else ""
            self.failures[rank] = Failure(-math.inf, said + before)

    def _report(self, rank: int, report: Report) -> None:
        if rank == 0:
            self.where = f" at step {report.done} of {report.total}"
        if self.bar is not None:
            self.bar.update(report, rank)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Print the complete lines; the rest waits for the end of its line."""
        self.num_writes += 1
        *lines, rest = (self.unfinished.pop((rank, stream), b"") + data).split(b"\n")
        if rest:
            self.unfinished[rank, stream] = rest
        for line in lines:
            self._print(rank, stream, line.decode("utf-8", "replace"))

    def _print(self, rank: int, stream: int, text: str) -> None:
        name = f"[rank {rank}] " if self.names else ""
        print_above_bar(name + text if text else name.rstrip(), getattr(sys, STREAMS[stream]))

    def _timeout(self, why: str) -> RankTimeout:
        """Make the error that says where each rank was, asking those still running."""
        waiting = self.waiting
        places = [f"rank {rank} {describe(stack)}" for rank, stack in self.processes.stacks(waiting).items()]
        done = self.world_size - len(waiting)
        return RankTimeout(f"{why}, {len(waiting)} of {self.world_size} ranks had not finished ({done} had)", places)

    def read_results(self) -> list:
        """Return the results in rank order; RankError for one that cannot be read here."""
        results = []
        for rank in range(self.world_size):
            try:
                results.append(pickle.loads(self.results[rank]))
            except Exception as error:
                said = f"its result arrived, but can't be read: {type(error).__name__}: {error}"
                raise RankError(rank, self.world_size, said) from error
        return results

    def end(self) -> None:
        """End all processes, then print their unfinished lines."""
        if self.processes is not None:
            self.processes.end(grace_s=TERM_S, finished=self.results)
            for (rank, stream), line in self.unfinished.items():
                self._print(rank, stream, line.decode("utf-8", "replace"))
