"""The processes of one group, as their parent sees them: it starts them, listens, asks where they are, and ends them.

`launch` and `Ranks` both use this. Processes are started by torch's own `start_processes`, which `mp.spawn` calls, too.
"""

import math
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch.multiprocessing

from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.errors import Answer, Failure, RankError, RankTimeout
from fsdp_helpers.ranks.hangs import LOOK_S, HangDetector
from fsdp_helpers.ranks.orphans import FOLDER
from fsdp_helpers.ranks.rank import Setup, run_rank
from fsdp_helpers.ranks.roll_call import waited_in_vain
from fsdp_helpers.ranks.server import (
    NO_MAIN_GUARD,
    end_orphans,
    interrupts_wait,
    main_guard_advice,
    ready_to_start,
)

GRACE_S = 0.5  # after a failure, to wait for the one that caused it, and for the other ranks' last output
TERM_S = 3.0  # after SIGTERM: a rank has this long before SIGKILL
READ_BYTES = 2**20  # more than a pipe holds


class Processes:
    """One process per rank, each with a link for messages and with pipes for its output.

    `body(rank, setup, send, link)` runs in each of them. Its output is passed to on_output(rank, stream, data), its
    notes to on_note(note, rank), and its answers to the last message are collected. With two `streams`, standard output
    and standard error are kept apart; with one, they stay in order. A `with` block ends the processes when it ends.
    """

    def __init__(
        self,
        body: Callable,
        world_size: int,
        device: str,
        on_output: Callable[[int, int, bytes], None],
        *,
        on_note: Callable[[Any, int], None] | None = None,
        payload: Any = None,
        timeout_s: float | None = None,
        streams: int = 1,
        start_method: str = "forkserver",
    ) -> None:
        self.world_size, self.on_output, self.on_note = world_size, on_output, on_note
        self.number = 0  # of the last message; 0 before the first, while ranks answer that they have joined
        self.answers: dict[int, Answer] = {}
        self.notes: dict[int, Any] = {}  # each rank's last note
        self.ends: dict[int, int | None] = {}  # ranks that have ended, and their exit codes
        self.hang = HangDetector(None)
        self._processes: list = []
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER.format(os.getpid()), ignore_cleanup_errors=True)
        self._setup = Setup(body, world_size, device, self.folder, dict(os.environ), payload, timeout_s)
        pipes = [[Pipe(), *(Pipe(duplex=False) for _ in range(streams))] for _ in range(world_size)]
        ours, theirs = ([[pipe[side] for pipe in own] for own in pipes] for side in (0, 1))
        self._links = [link for link, *_ in ours]
        self._outputs = {end: (rank, i) for rank, (_, *ends) in enumerate(ours) for i, end in enumerate(ends)}
        self._ours = sum(ours, [])
        try:
            with interrupts_wait(), ready_to_start(start_method):
                start = torch.multiprocessing.start_processes
                started = start(run_rank, (self._setup, theirs), world_size, join=False, start_method=start_method)
                self._processes = started.processes
        except BaseException:
            self.end()
            raise
        finally:
            for end in sum(theirs, []):
                end.close()  # the ranks have them now

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(grace_s=TERM_S)

    @property
    def folder(self) -> str:
        """The private folder in which the group meets."""
        return self._folder.name

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # ------------------------------------------------------------ a message and its answers

    def tell(self, ranks: Iterable[int], *message: str) -> None:
        """Send a message to these ranks, each of which will answer."""
        self.number, self.answers, self.notes = self.number + 1, {}, {}
        for rank in ranks:
            with suppress(OSError):  # it has just ended, as `collect` will see
                self._links[rank].send_bytes(pickle.dumps((self.number, *message)))

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ones among these ranks that have neither answered nor ended."""
        return [rank for rank in ranks if rank not in self.answers and rank not in self.ends]

    def collect(self, ranks: Iterable[int], until_s: float = math.inf, failed: bool = False) -> None:
        """Receive these ranks' answers until all have arrived, time is up, or the ranks hang.

        Once a rank has failed or ended, wait only GRACE_S longer, unless the caller already knows that one has
        `failed`.
        """
        while waiting := self.missing(ranks):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or (not failed and self.hang.lasts([self.pids[rank] for rank in waiting])):
                return
            self._listen(waiting, min(left_s, LOOK_S))
            if not failed and self.find_cause():
                failed, until_s = True, time.monotonic() + GRACE_S

    def answers_of_all(self, began_s: float, timeout_s: float | None) -> list:
        """Return the values that all ranks answer with, in rank order.

        Raises RankError if a rank fails or ends, and RankTimeout if the ranks hang, or if some haven't answered
        `timeout_s` seconds after `began_s`.
        """
        everyone, until_s = range(self.world_size), began_s + (timeout_s or math.inf)
        self.collect(everyone, until_s)
        if cause := self.find_cause():
            raise RankError(cause[0], self.world_size, cause[1].summary, cause[1].details)
        if missing := self.missing(everyone):
            is_hang = time.monotonic() < until_s
            time_s = (
                f"{self.hang.stall_s} s in which no rank computed or reported anything" if is_hang else f"{timeout_s} s"
            )
            done = f"{len(missing)} of {self.world_size} ranks had not finished ({self.world_size - len(missing)} had)"
            places = [f"rank {rank} {stacks.describe(stack)}" for rank, stack in self.stacks(missing).items()]
            raise RankTimeout(f"after {time_s}, {done}", places)
        return [self.answers[rank].value for rank in everyone]

    def find_cause(self) -> tuple[int, Failure] | None:
        """Return the rank that made the others fail, and its failure; None if no rank has failed.

        A rank that has ended comes before one that reported a failure, and those that only waited for others come last.
        If several ranks sent the same message, it's the first of them.
        """
        for rank in sorted(self.ends.keys() - self.answers.keys()):
            return rank, Failure(self.describe_end(rank))
        failures = {rank: answer.failure for rank, answer in sorted(self.answers.items()) if answer.failure}
        if not failures:
            return None
        first = min(failures.values(), key=lambda failure: (waited_in_vain(failure.summary), failure.when_s))
        return next((rank, failure) for rank, failure in failures.items() if failure.summary == first.summary)

    def _listen(self, ranks: Iterable[int], wait_s: float) -> None:
        """Wait for messages, output, or the end of one of these ranks; pass on whatever has arrived."""
        links = {self._links[rank]: rank for rank in ranks}
        sentinels = {self._processes[rank].sentinel: rank for rank in ranks}
        ready = set(wait([*links, *sentinels, *self._outputs], wait_s))
        for link, rank in links.items():
            if link in ready:
                self._receive(rank, link)
        for sentinel, rank in sentinels.items():
            # If it left a message behind, it counts as ended once that has been read.
            if sentinel in ready and rank not in self.ends and not self._links[rank].poll():
                self._note_end(rank)
        self._read_outputs()

    def _receive(self, rank: int, link: Connection) -> None:
        try:
            message = link.recv_bytes()
        except (EOFError, OSError):
            self._note_end(rank)
            return
        self.hang.moved()
        try:
            kind, content = pickle.loads(message)
        except Exception as error:
            said = f"its answer arrived, but can't be read: {type(error).__name__}: {error}"
            kind, content = "answer", Answer(None, failure=Failure(said))
        if kind == "note":
            self.notes[rank] = content
            if self.on_note:
                self.on_note(content, rank)
        elif content.number in (self.number, None):  # else it answers a cell that was interrupted
            self.answers[rank] = content

    def _read_outputs(self) -> None:
        """Pass on what's in the pipes now; a rank that never stops writing doesn't hold us up."""
        for output, (rank, stream) in list(self._outputs.items()):
            if output.poll():
                if data := os.read(output.fileno(), READ_BYTES):
                    self.hang.moved()
                    self.on_output(rank, stream, data)
                else:
                    del self._outputs[output]

    # ------------------------------------------------------------ how ranks end

    def _note_end(self, rank: int) -> None:
        """Wait for a process to end, and record its exit code."""
        self._processes[rank].join(TERM_S)
        self.ends[rank] = self._processes[rank].exitcode
        if self.ends[rank] == NO_MAIN_GUARD:
            raise RuntimeError(main_guard_advice()) from None  # not from the end of its link, if that came first

    def note_ends(self) -> None:
        """Record the ranks that have ended since the last check."""
        for rank, process in enumerate(self._processes):
            if rank not in self.ends and not process.is_alive():
                self._note_end(rank)

    def describe_end(self, rank: int) -> str:
        """Describe the end of a process that didn't send a message."""
        code = self.ends[rank]
        if code is None or code >= 0:
            return f"the process left with exit status {code}"
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        hint = " from outside (often by the system, out of memory)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}"

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the Python stack of each of these ranks; "" for one that cannot answer."""
        alive = {rank: self._processes[rank].pid for rank in ranks if self._processes[rank].is_alive()}
        found = stacks.ask({pid: self._setup.stack_file(rank) for rank, pid in alive.items()})
        return {rank: found.get(alive.get(rank), "") for rank in ranks}

    def signal(self, rank: int, number: int) -> None:
        if self._processes[rank].is_alive():
            os.kill(self._processes[rank].pid, number)

    def end(self, *, grace_s: float = 0.0) -> None:
        """End all processes and everything they've started, holding back interrupts. You can call this more than once.

        Processes that have answered the last message exit by themselves; the others get a SIGTERM if there's a grace
        period. Those still running after `grace_s` seconds are killed.
        """
        with interrupts_wait():
            until_s = time.monotonic() + grace_s
            for rank, process in enumerate(self._processes):
                answer = self.answers.get(rank) if self.number else None
                if grace_s and (answer is None or answer.failure):
                    process.terminate()
            for process in self._processes:
                process.join(max(0.0, until_s - time.monotonic()))
                process.kill()
            for process in self._processes:
                process.join()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, unless a server has adopted that
            if self._processes:
                end_orphans()
                self._read_outputs()
            for process in self._processes:
                process.close()
            for connection in self._ours:
                connection.close()
            self._processes = []
            self._folder.cleanup()
