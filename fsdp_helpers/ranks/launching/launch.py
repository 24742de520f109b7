"""Start one process per rank, show progress, return the results, and leave nothing behind.

Workers are importable functions `worker(rank, world_size, *args)`. Their processes are forked from a server that has
torch loaded already (`forkserver`), so launches after the first take a fraction of a second. The server holds
third-party modules only: an edit to `fsdp_helpers` or to your own module takes effect from the next launch on.
"""

import math
import multiprocessing.connection
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_helpers.ranks.group import check_timeout, choose_device
from fsdp_helpers.ranks.keeper import TERM_S, end_group
from fsdp_helpers.ranks.launching import stacks
from fsdp_helpers.ranks.launching.edits import follow_edits
from fsdp_helpers.ranks.launching.errors import Interrupted, RankError, RankTimeout, shown_by_message
from fsdp_helpers.ranks.launching.job import Job, begin_rank
from fsdp_helpers.ranks.launching.pickling import check_worker, pickle_job
from fsdp_helpers.ranks.launching.process import Failure, run_rank
from fsdp_helpers.ranks.launching.standstill import Standstill
from fsdp_helpers.ranks.launching.start import (
    NO_MAIN_GUARD,
    RANK_NAME,
    check_not_imported,
    choose_start_method,
    environment_changes,
    interrupts_wait,
    main_guard_advice,
    ready_to_start,
    server_in_use,
    why_it_takes_long,
)
from fsdp_helpers.ranks.progress import ProgressBar, count_ranks
from fsdp_helpers.ranks.roll_call import list_ranks

GRACE_S = 0.5  # after a failure: wait this long for the failure that caused it
END_S = 3.0  # after its result: a rank has this long to end by itself
KILL_S = TERM_S + 5.0  # after SIGTERM: wait this long for keepers, which send SIGKILL themselves, before SIGKILL
LONGEST_WAIT_S = 3600.0  # in one go; the system knows no wait of years


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
    with tempfile.TemporaryDirectory(prefix="fsdp_helpers-") as folder:
        reports = {"all_report": output.draws and bar.wants_all_ranks}
        job = Job(payload, world_size, device, folder, environment_changes(), group_timeout_s, **reports)
        try:
            with server_in_use():
                return _run(job, start_method, output, timeout_s, stall_s)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted{output.where}; all ranks are stopped") from None


def _run(job: Job, start_method: str, output: "_Output", timeout_s: float | None, stall_s: float | None) -> list:
    """Start the ranks, wait for their results, and stop whatever still runs, however this ends."""
    ranks: list[_Rank] = []
    try:
        with interrupts_wait(), ready_to_start(start_method, job.device) as context:
            for rank in range(job.world_size):
                ranks.append(_start_rank(rank, job, context))
        return _collect(ranks, job, output, timeout_s, stall_s)
    finally:
        output.bar.close()
        with interrupts_wait():
            _stop(ranks)


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

    def start(self, what: str, why: str) -> None:
        if self.draws:
            self.bar.start(what, why)

    def line(self, rank: int, stream: str, text: str) -> None:
        name = f"[rank {rank}] " if self.names else ""
        self.bar.print(name + text if text else name.rstrip(), getattr(sys, stream))

    def report(self, rank: int, done: int, total: int, *said: Any) -> None:
        if rank == 0:
            self.where = f" at step {done} of {total}"
        if not self.draws:
            return
        if self.bar.wants_all_ranks:
            self.bar.update(rank, done, total, *said)
        else:
            self.bar.update(done, total, *said)


@dataclass
class _Rank:
    """The parent's view of one rank."""

    rank: int
    process: Any
    connection: multiprocessing.connection.Connection
    in_group: bool = False
    result: bytes | None = None
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return self.connection.closed


def _start_rank(rank: int, job: Job, context: Any) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    arguments = (pickle.dumps(run_rank), rank, job, sender)
    process = context.Process(target=begin_rank, args=arguments, name=f"{RANK_NAME}{rank}")
    process.start()
    sender.close()  # rank and keeper hold the only copies now: when they end, the receiver sees the end of the stream
    return _Rank(rank, process, receiver)


def _collect(
    ranks: list[_Rank], job: Job, output: _Output, timeout_s: float | None, stall_s: float | None = None
) -> list:
    standstill = Standstill(stall_s)
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while waiting := [rank for rank in ranks if not rank.ended]:
        left_s = None if deadline_s is None else min(max(0.0, deadline_s - time.monotonic()), LONGEST_WAIT_S)
        ready = multiprocessing.connection.wait([rank.connection for rank in waiting], standstill.shorten(left_s))
        failed_before = any(rank.failure for rank in ranks)
        for rank in waiting:
            if rank.connection in ready:
                _receive(rank, output)
        all_in_group = all(rank.in_group for rank in ranks)
        if all_in_group:
            output.bar.running()
        if not failed_before and any(rank.failure for rank in ranks):
            deadline_s = time.monotonic() + GRACE_S
        elif deadline_s is not None and time.monotonic() >= deadline_s:  # also where a rank never stops sending
            if failed_before:
                break
            if running := [rank for rank in waiting if not rank.ended]:
                raise _timeout(f"after {timeout_s} s", running, job)
        elif ready or not all_in_group:
            standstill.moved()
        elif not failed_before and standstill.lasts([rank.process.pid for rank in waiting]):
            raise _timeout(f"after {standstill.stall_s} s in which no rank computed or reported anything", waiting, job)
    failures = [rank.failure for rank in ranks if rank.failure]
    if failures:
        first = min(failures, key=lambda failure: failure.when_s)
        summary = first.summary + (_who_is_silent(ranks, job) if first.aborted else "")
        raise RankError(first.rank, job.world_size, summary, first.details)
    return [_unpickle(rank, job) for rank in ranks]


def _unpickle(rank: _Rank, job: Job) -> Any:
    try:
        return pickle.loads(rank.result)
    except Exception as error:
        summary = f"its result arrived and cannot be read: {type(error).__name__}: {error}"
        raise RankError(rank.rank, job.world_size, summary) from error


def _receive(rank: _Rank, output: _Output) -> None:
    try:
        kind, content = rank.connection.recv()
    except (EOFError, ConnectionResetError):
        rank.connection.close()
        if rank.result is None and rank.failure is None:
            rank.failure = _death(rank)
        return
    if kind == "result":
        rank.result = content
    elif kind == "failure":
        rank.failure = rank.failure or content
    elif kind == "in group":
        rank.in_group = True
    elif kind == "line":
        output.line(rank.rank, *content)
    else:
        output.report(rank.rank, *content)


def _death(rank: _Rank) -> Failure:
    """Describe a rank that ended without a message: it is the cause of whatever the others report."""
    rank.process.join(END_S)
    code = rank.process.exitcode
    if code == NO_MAIN_GUARD:
        raise RuntimeError(main_guard_advice()) from None
    if code is not None and code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        hint = " from outside (often by the system, out of memory)" if name == "SIGKILL" else ""
        return Failure(rank.rank, float("-inf"), f"the process was ended by {name}{hint}", aborted=name == "SIGABRT")
    return Failure(rank.rank, float("-inf"), f"the process left with exit status {code} before its worker returned")


def _who_is_silent(ranks: list[_Rank], job: Job) -> str:
    """Name the ranks that live but do not answer after an abort; the rank that aborted may have waited for them."""
    running = [rank for rank in ranks if not rank.ended and rank.process.is_alive()]
    stacks.ask({rank.process.pid: job.stack_file(rank.rank) for rank in running})
    silent = [rank.rank for rank in running if not stacks.has_answered(job.stack_file(rank.rank))]
    return f", and {list_ranks(silent)} did not answer: stopped or stuck, and waited for in vain?" if silent else ""


def _timeout(why: str, waiting: list[_Rank], job: Job) -> RankTimeout:
    """Make the error that says where each rank stood, asking those that still run."""
    stacks.ask({rank.process.pid: job.stack_file(rank.rank) for rank in waiting if rank.process.is_alive()})
    places = [f"rank {rank.rank} {stacks.describe(job.stack_file(rank.rank))}" for rank in waiting]
    done = job.world_size - len(waiting)
    return RankTimeout(f"{why}, {len(waiting)} of {job.world_size} ranks had not finished ({done} had)", places)


def _stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive() and rank.result is None:
            rank.process.terminate()
    for rank in ranks:
        rank.process.join(END_S)
        for end in (rank.process.terminate, rank.process.kill):
            if rank.process.is_alive():
                end()
                rank.process.join(KILL_S)
        end_group(rank.process.pid)
        rank.connection.close()
        rank.process.close()
