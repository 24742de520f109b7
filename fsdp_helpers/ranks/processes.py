"""The processes of one group, as their parent sees them: started, listened to, asked where they are, and ended.

`launch` and `Ranks` both use it; torch's own `start_processes`, which `mp.spawn` calls too, starts them.
"""

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
from fsdp_helpers.ranks.orphans import FOLDER
from fsdp_helpers.ranks.rank import Setup, run_rank
from fsdp_helpers.ranks.server import (
    NO_MAIN_GUARD,
    end_orphans,
    interrupts_wait,
    main_guard_advice,
    ready_to_start,
)

TERM_S = 3.0  # after SIGTERM: a rank has this long before SIGKILL
LONGEST_WAIT_S = 3600.0  # in one go; the system knows no wait of years
READ_BYTES = 2**20  # more than a pipe holds


class Processes:
    """One process per rank, each with a link for messages and with pipes for its output.

    `body(rank, setup, send, link)` runs in each of them, and its output arrives as on_output(rank, stream, data). With
    two `streams`, standard output and error are kept apart, with one they stay in order.
    """

    def __init__(
        self,
        body: Callable,
        world_size: int,
        device: str,
        on_output: Callable[[int, int, bytes], None],
        *,
        payload: Any = None,
        timeout_s: float | None = None,
        streams: int = 1,
        start_method: str = "forkserver",
    ) -> None:
        self.on_output = on_output
        self.ends: dict[int, int | None] = {}  # ranks that have ended, and their exit codes
        self._processes: list = []
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER.format(os.getpid()), ignore_cleanup_errors=True)
        self._setup = Setup(body, world_size, device, self.folder, dict(os.environ), payload, timeout_s)
        pipes = [[Pipe(), *(Pipe(duplex=False) for _ in range(streams))] for _ in range(world_size)]
        ours, theirs = ([[pipe[side] for pipe in own] for own in pipes] for side in (0, 1))
        self.links = [link for link, *_ in ours]
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

    @property
    def folder(self) -> str:
        """The private folder in which the group meets."""
        return self._folder.name

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self, ranks: Iterable[int], wait_s: float) -> list[tuple[int, str, Any]]:
        """Wait for messages, output or exits; pass output on; return (rank, kind, content) of the messages.

        The end of one of `ranks` is also a message, its last one, of kind "end".
        """
        links = {self.links[rank]: rank for rank in ranks if rank not in self.ends}
        sentinels = {self._processes[rank].sentinel: rank for rank in links.values()}
        ready = set(wait([*links, *sentinels, *self._outputs], min(wait_s, LONGEST_WAIT_S)))
        messages = [self._receive(rank, link) for link, rank in links.items() if link in ready]
        for sentinel, rank in sentinels.items():
            # One that has left a message behind ends once that is read.
            if sentinel in ready and rank not in self.ends and not self.links[rank].poll():
                messages.append(self._note_end(rank))
        self.read_outputs()
        return messages

    def _receive(self, rank: int, link: Connection) -> tuple[int, str, Any]:
        try:
            message = link.recv_bytes()
        except (EOFError, OSError):
            return self._note_end(rank)
        return rank, *pickle.loads(message)

    def _note_end(self, rank: int) -> tuple[int, str, None]:
        """Wait for a process to end, and record its exit code; return its last message."""
        self._processes[rank].join(TERM_S)
        self.ends[rank] = self._processes[rank].exitcode
        if self.ends[rank] == NO_MAIN_GUARD:
            raise RuntimeError(main_guard_advice())
        return rank, "end", None

    def note_ends(self) -> None:
        """Record the ranks that have ended since the last check."""
        for rank, process in enumerate(self._processes):
            if rank not in self.ends and not process.is_alive():
                self._note_end(rank)

    def describe_end(self, rank: int) -> str:
        """Describe how a process ended that sent no message."""
        code = self.ends[rank]
        if code is None or code >= 0:
            return f"the process left with exit status {code}"
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        hint = " from outside (often by the system, out of memory)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}"

    def read_outputs(self) -> None:
        """Pass on what's in the pipes now; a rank that never stops writing doesn't hold us up."""
        for output, (rank, stream) in list(self._outputs.items()):
            if output.poll():
                if data := os.read(output.fileno(), READ_BYTES):
                    self.on_output(rank, stream, data)
                else:
                    del self._outputs[output]

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the Python stack of each of these ranks; "" for one that cannot answer."""
        alive = {rank: self._processes[rank].pid for rank in ranks if self._processes[rank].is_alive()}
        found = stacks.ask({pid: self._setup.stack_file(rank) for rank, pid in alive.items()})
        return {rank: found.get(alive.get(rank), "") for rank in ranks}

    def signal(self, rank: int, number: int) -> None:
        if self._processes[rank].is_alive():
            os.kill(self._processes[rank].pid, number)

    def end(self, *, grace_s: float = 0.0, finished: Iterable[int] = ()) -> None:
        """End all processes and everything that they have started; it may be called again, and interrupts wait.

        Those that have `finished` may leave by themselves; `grace_s` after SIGTERM the others are killed.
        """
        with interrupts_wait():
            until_s = time.monotonic() + grace_s
            for rank, process in enumerate(self._processes):
                if grace_s and rank not in finished:
                    process.terminate()
            for process in self._processes:
                process.join(max(0.0, until_s - time.monotonic()))
                process.kill()
            for process in self._processes:
                process.join()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, if no server has adopted that
            if self._processes:
                end_orphans()
                self.read_outputs()
            for process in self._processes:
                process.close()
            for connection in self._ours:
                connection.close()
            self._processes = []
            self._folder.cleanup()
