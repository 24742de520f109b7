"""The processes of one group, which their parent starts, watches and stops.

`launch` and `Ranks` both use this. Processes are started by torch's own `start_processes`, which `mp.spawn` calls, too.
"""

import math
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Pipe, wait
from typing import Any

import psutil
from torch.multiprocessing import start_processes

from fsdp_helpers.ranks import server, stacks
from fsdp_helpers.ranks.errors import Answer, Failure, RankError, RankTimeout
from fsdp_helpers.ranks.group import blames_another_rank
from fsdp_helpers.ranks.rank import run_rank

GRACE_S = 0.5  # after a failure, to wait for the one that caused it, and for the other ranks' last output
TERM_S = 3.0  # after SIGTERM: a rank has this long before SIGKILL
READ_BYTES = 2**20  # more than a pipe holds
LOOK_S = 0.5  # between two checks of whether the ranks have hung; a check takes milliseconds
WAITING_SHARE = 0.03  # of a core; a rank that uses less than this is only waiting


class Processes(AbstractContextManager):
    """One process per rank, each with a link for messages and with pipes for its output.

    Each runs `body`; see `run_rank`. Its output goes to on_output(rank, stream, data), and its notes go to on_note(note,
    rank). Its answers to the last message are collected. With two `streams`, standard output and standard error are
    kept apart; with one, they stay in order. The processes are stopped when the `with` block ends.
    """

    def __init__(
        self,
        body: Callable,
        world_size: int,
        device: str,
        on_output: Callable[[int, int, bytes], None],
        *,
        on_note: Callable[[Any, int], None] | None = None,
        streams: int = 1,
        stall_s: float | None = None,
    ) -> None:
        self.world_size, self.on_output, self.on_note, self.stall_s = world_size, on_output, on_note, stall_s
        self.number = 0  # of the last message; 0 before the first
        self.answers: dict[int, Answer] = {}
        self.notes: dict[int, Any] = {}  # each rank's last note
        self.traced: dict[int, list] = {}  # what each rank has sent of its trace of a cell
        self.ends: dict[int, int | None] = {}  # ranks that have ended, and their exit codes
        self._moved()
        self._processes: list = []
        prefix = server.FOLDER.format(os.getpid())
        self.folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)  # where the group meets
        pipes = [[Pipe(), *(Pipe(duplex=False) for _ in range(streams))] for _ in range(world_size)]
        ours, theirs = ([[pipe[side] for pipe in own] for own in pipes] for side in (0, 1))
        self._links = [link for link, *_ in ours]
        self._outputs = {end: (rank, i) for rank, (_, *ends) in enumerate(ours) for i, end in enumerate(ends)}
        self._mark = "" if server.adopts() else self.folder.name
        environment = os.environ | ({server.MARK: self._mark} if self._mark else {})
        arguments = body, world_size, device, self.folder.name, environment, theirs
        try:
            with server.interrupts_wait(), server.start_lock, server.ready_to_start(self._mark) as method:
                started = start_processes(run_rank, arguments, world_size, join=False, start_method=method)
                self._processes = started.processes
        except BaseException:
            self.end()
            raise
        finally:
            for end in sum(theirs, []):
                end.close()  # the ranks have them now

    def __exit__(self, *_: object) -> None:
        self.end(grace_s=TERM_S)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # ------------------------------------------------------------ a message and its answers

    def tell(self, ranks: Iterable[int], *message: Any) -> None:
        """Send a message to these ranks, each of which will answer."""
        self.number, self.answers, self.notes, self.traced = self.number + 1, {}, {}, {}
        for rank in ranks:
            with suppress(OSError):  # it has just ended, as `collect` will see
                self._links[rank].send_bytes(pickle.dumps((self.number, *message)))

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks in `ranks` that have neither answered nor exited."""
        return [rank for rank in ranks if rank not in self.answers and rank not in self.ends]

    def collect(self, ranks: Iterable[int], until_s: float = math.inf, grace_s: float = GRACE_S) -> None:
        """Receive these ranks' answers until all have arrived, time is up, or the ranks hang.

        Once a rank has failed or exited, wait only `grace_s` longer.
        """
        while waiting := self.missing(ranks):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._have_hung(waiting):
                return
            self._listen(waiting, min(left_s, LOOK_S))
            if self.find_cause():
                until_s = min(until_s, time.monotonic() + grace_s)

    def answers_of_all(self, timeout_s: float | None = None) -> list:
        """Return the values in all ranks' answers, in rank order.

        Raises RankError if a rank fails or exits, and RankTimeout if the ranks hang or some haven't answered after
        `timeout_s` seconds.
        """
        everyone, until_s = range(self.world_size), time.monotonic() + (timeout_s or math.inf)
        self.collect(everyone, until_s)
        if cause := self.find_cause():
            raise RankError(cause[0], self.world_size, cause[1].summary, cause[1].details)
        if missing := self.missing(everyone):
            hung = f"{self.stall_s} s in which no rank computed or reported anything"
            time_s = hung if time.monotonic() < until_s else f"{timeout_s} s"
            done = f"{len(missing)} of {self.world_size} ranks had not finished ({self.world_size - len(missing)} had)"
            places = [f"rank {rank} {stacks.describe(stack)}" for rank, stack in self.stacks(missing).items()]
            raise RankTimeout(f"after {time_s}, {done}", places)
        return [self.answers[rank].value for rank in everyone]

    def find_cause(self) -> tuple[int, Failure] | None:
        """Return the rank that made the others fail, and its failure; None if no rank has failed.

        A rank that has exited comes before ranks that reported a failure; ranks that only waited for others come last,
        and after those whose time was up, others whose connection they closed. If several ranks sent the same message,
        the first of them is returned.
        """
        if ended := self.ends.keys() - self.answers.keys():
            return min(ended), Failure(self.describe_end(min(ended)))
        failures = {rank: answer.failure for rank, answer in sorted(self.answers.items()) if answer.failure}
        if not failures:
            return None

        def place(failure: Failure) -> tuple:
            blames = blames_another_rank(failure.summary)
            return blames, blames and "timed out" not in failure.summary.lower(), failure.when_s

        first = min(failures.values(), key=place)
        return next((rank, failure) for rank, failure in failures.items() if failure.summary == first.summary)

    def _listen(self, ranks: Iterable[int], wait_s: float) -> None:
        """Wait until one of these ranks sends a message, prints or exits; pass on what has arrived."""
        links, ends = [self._links[rank] for rank in ranks], [self._processes[rank].sentinel for rank in ranks]
        if not wait([*links, *ends, *self._outputs], wait_s):
            self.on_output(next(iter(ranks)), 0, b"")  # so that what has come before can be shown
        for rank in ranks:
            has_ended = not self._processes[rank].is_alive()
            if self._links[rank].poll():  # perhaps a message that it left behind
                self._receive(rank)
            elif has_ended:
                self._note_end(rank)
        self._read_outputs()

    def _receive(self, rank: int) -> None:
        try:
            message = self._links[rank].recv_bytes()
        except (EOFError, OSError):
            self._note_end(rank)
            return
        self._moved()
        try:
            kind, content = pickle.loads(message)
        except Exception as error:
            said = f"its answer arrived, but can't be read: {type(error).__name__}: {error}"
            kind, content = "answer", Answer(None, failure=Failure(said))
        if kind == "note":
            self.notes[rank] = content
            if self.on_note:
                self.on_note(content, rank)
        elif kind == "trace":
            self.traced.setdefault(rank, []).append(content)
        elif content.number in (self.number, None):  # otherwise, it answers a cell that was interrupted
            self.answers[rank] = content

    def _read_outputs(self) -> None:
        """Pass on what the pipes contain now, without waiting for a rank that never stops writing."""
        for output, (rank, stream) in list(self._outputs.items()):
            if output.poll():
                if data := os.read(output.fileno(), READ_BYTES):
                    self._moved()
                    self.on_output(rank, stream, data)
                else:
                    del self._outputs[output]

    def _moved(self) -> None:
        """Restart the clock of `_have_hung`, because a rank has sent or computed something."""
        self._since_s, self._spent_s = time.monotonic(), {}

    def _have_hung(self, ranks: Iterable[int]) -> bool:
        """Return True once these ranks and their descendants have made no progress for `stall_s` seconds.

        The clock alone can't tell, because a correct program may be slow on a busy machine. But it keeps using its
        share of the cores, whereas ranks that wait in a collective use a hundredth of a core at most. Ranks that
        haven't sent a note yet are still joining their group, which may take as long as it needs.
        """
        if self.stall_s is None or len(self.notes) < self.world_size or time.monotonic() - self._since_s < LOOK_S:
            return False
        for rank in ranks:
            spent_s = cpu_seconds(self.pids[rank])
            if spent_s - self._spent_s.setdefault(rank, spent_s) > WAITING_SHARE * self.stall_s:
                self._moved()
                return False
        return time.monotonic() - self._since_s >= self.stall_s

    # ------------------------------------------------------------ how ranks end

    def _note_end(self, rank: int) -> None:
        """Wait for a process to exit, and record its exit code."""
        self._processes[rank].join(TERM_S)
        self.ends[rank] = self._processes[rank].exitcode
        if self.ends[rank] == server.NO_MAIN_GUARD:
            raise RuntimeError(
                f"{os.path.basename(sys.argv[0])} has no main guard: every rank imports the script, and would launch ranks of "
                'its own; put what starts them under `if __name__ == "__main__":`'
            ) from None  # not from the end of its link, if that came first

    def describe_end(self, rank: int) -> str:
        """Describe how a process exited without sending a message."""
        code = self.ends[rank]
        if code is None or code >= 0:
            return f"the process ended with exit status {code}"
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        hint = " from outside (often by the system, out of memory)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}"

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the Python stack of each of these ranks; "" for any rank that can't answer."""
        alive = {rank: self.pids[rank] for rank in ranks if self._processes[rank].is_alive()}
        return dict.fromkeys(ranks, "") | stacks.ask(self.folder.name, alive)

    def end(self, *, grace_s: float = 0.0) -> None:
        """Stop all processes and everything they've started, holding back interrupts. You can call this more than once.

        If there's a grace period, they get a SIGTERM first. Those still running after `grace_s` seconds are killed.
        """
        with server.interrupts_wait():
            until_s = time.monotonic() + grace_s
            for process in self._processes if grace_s else ():
                process.terminate()
            for process in self._processes:
                process.join(max(0.0, until_s - time.monotonic()))
                process.kill()
            for process in self._processes:
                process.join()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, unless a server has adopted that
            server.end_orphans()
            if self._mark and self._processes:
                server.end_marked(self._mark)
            self._read_outputs()
            self._processes = []
            self.folder.cleanup()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all of its living descendants, in seconds."""
    seconds = 0.0
    with suppress(psutil.NoSuchProcess):
        members = [psutil.Process(pid)]
        with suppress(psutil.AccessDenied):  # it looks at every process on the machine, which some clusters forbid
            members += members[0].children(recursive=True)
        for member in members:
            with suppress(psutil.NoSuchProcess):
                seconds += sum(member.cpu_times()[:2])  # in user and in kernel mode
    return seconds
