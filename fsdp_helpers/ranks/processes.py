"""The processes of one group, as their parent sees them: started, listened to, asked where they are, and ended.

`launch` and `Ranks` both stand on it; torch's own `start_processes`, which `mp.spawn` calls too, starts them.
"""

import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.multiprocessing

from fsdp_helpers.ranks import stacks
from fsdp_helpers.ranks.orphans import end_group
from fsdp_helpers.ranks.rank import run_rank
from fsdp_helpers.ranks.server import (
    NO_MAIN_GUARD,
    choose_start_method,
    end_orphans,
    environment_changes,
    interrupts_wait,
    main_guard_advice,
    ready_to_start,
    server_in_use,
    start_lock,
)
from fsdp_helpers.ranks.setup import Setup, begin_rank

TERM_S = 3.0  # after SIGTERM: a rank has this long before SIGKILL
LONGEST_WAIT_S = 3600.0  # in one go; the system knows no wait of years
READ_BYTES = 2**20  # more than a pipe holds


class Processes:
    """One process per rank, each with a link for messages and with pipes for what it writes.

    `body(rank, setup, send, link)` runs in each of them, and what it writes arrives as on_output(rank, stream, data).
    With two `streams`, standard output and error are kept apart, with one they stay in order.
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
        start_method: str | None = None,
    ) -> None:
        self.world_size, self.on_output = world_size, on_output
        self.ends: dict[int, int | None] = {}  # ranks that have ended, and their exit codes
        self._processes: list = []
        self._exits = ExitStack()
        self._exits.enter_context(server_in_use())
        self.folder = tempfile.mkdtemp(prefix="fsdp_helpers-")
        self._setup = Setup(
            world_size, device, self.folder, environment_changes(), pickle.dumps(body), payload, timeout_s
        )
        pairs = [multiprocessing.connection.Pipe() for _ in range(world_size)]
        pipes = [[multiprocessing.connection.Pipe(duplex=False) for _ in range(streams)] for _ in range(world_size)]
        self.links = [ours for ours, _ in pairs]
        self._outputs = {ours: (rank, i) for rank, ends in enumerate(pipes) for i, (ours, _) in enumerate(ends)}
        theirs, their_outputs = [end for _, end in pairs], [tuple(end for _, end in ends) for ends in pipes]
        try:
            with interrupts_wait():
                self._start(choose_start_method(start_method), theirs, their_outputs)
        except BaseException:
            self.end()
            raise
        finally:
            for connection in (*theirs, *(end for ends in their_outputs for end in ends)):
                connection.close()  # ranks hold the only copies now: when they end, we see the end of the stream

    def _start(self, start_method: str, links: list, outputs: list) -> None:
        arguments = (pickle.dumps(run_rank), self._setup, links, outputs)
        with start_lock, ready_to_start(start_method, self._setup.device):
            context = torch.multiprocessing.start_processes(
                begin_rank, arguments, self.world_size, join=False, start_method=start_method
            )
        self._processes, self._error_files = context.processes, context.error_files

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self, ranks: Iterable[int], wait_s: float) -> list[tuple[int, str, Any]]:
        """Wait for messages, output or ends; pass output on; return (rank, kind, content) of the messages.

        The end of one of `ranks` is a message too, its last one, of the kind "end".
        """
        links = {self.links[rank]: rank for rank in ranks if rank not in self.ends}
        ends = {self._processes[rank].sentinel: rank for rank in links.values()}
        ready = multiprocessing.connection.wait([*links, *ends, *self._outputs], min(wait_s, LONGEST_WAIT_S))
        messages = []
        for link in links.keys() & set(ready):
            messages += self._receive(links[link], link)
        for rank in {ends[end] for end in ends.keys() & set(ready)} - self.ends.keys():
            if not self.links[rank].poll():  # else it has left a message behind
                messages.append(self.note_end(rank))
        self.read_outputs()
        return messages

    def _receive(self, rank: int, link: multiprocessing.connection.Connection) -> list[tuple[int, str, Any]]:
        try:
            return [(rank, *pickle.loads(link.recv_bytes()))]
        except (EOFError, OSError):
            return [self.note_end(rank)]

    def read_outputs(self) -> None:
        """Pass on what lies in the pipes now; a rank that never stops writing does not hold us up."""
        for output, (rank, stream) in list(self._outputs.items()):
            if output.poll():
                if data := os.read(output.fileno(), READ_BYTES):
                    self.on_output(rank, stream, data)
                else:
                    output.close()
                    del self._outputs[output]

    def note_end(self, rank: int) -> tuple[int, str, None]:
        """Wait for a process that ends, and note its exit code; return its last message."""
        process = self._processes[rank]
        process.join(TERM_S)
        self.ends[rank] = process.exitcode
        if process.exitcode == NO_MAIN_GUARD:
            raise RuntimeError(main_guard_advice())
        return rank, "end", None

    def note_ends(self) -> None:
        """Note the ranks that have ended since the last look."""
        for rank in range(self.world_size):
            if rank not in self.ends and not self._processes[rank].is_alive():
                self.note_end(rank)

    def describe_end(self, rank: int) -> str:
        """Return how a process ended that sent no message of its own."""
        code = self.ends[rank]
        if code is not None and code < 0:
            name = signal_name(code)
            hint = " from outside (often by the system, out of memory)" if name == "SIGKILL" else ""
            return f"the process was ended by {name}{hint}"
        return f"the process left with exit status {code}"

    def own_traceback(self, rank: int) -> str | None:
        """Return the traceback of a rank that failed before it could send one: torch keeps it in a file."""
        file = Path(self._error_files[rank])
        return pickle.loads(file.read_bytes()).rstrip() if file.exists() else None

    def is_alive(self, rank: int) -> bool:
        return self._processes[rank].is_alive()

    def ask_where(self, ranks: Iterable[int]) -> None:
        """Have each of these ranks write its stack, if it still can."""
        files = {self._processes[rank].pid: self._setup.stack_file(rank) for rank in ranks if self.is_alive(rank)}
        stacks.ask(files)

    def where(self, rank: int) -> str:
        return stacks.describe(self._setup.stack_file(rank))

    def line_file(self, rank: int) -> Path:
        return self._setup.line_file(rank)

    def is_in_collective(self, rank: int) -> bool:
        """Return whether the rank was in torch's own code for groups when it was asked."""
        return stacks.is_in_collective(self._setup.stack_file(rank))

    def has_answered(self, rank: int) -> bool:
        return stacks.has_answered(self._setup.stack_file(rank))

    def signal(self, rank: int, number: int) -> None:
        if self.is_alive(rank):
            os.kill(self._processes[rank].pid, number)

    def end_all(self) -> None:
        """Kill all processes; `end` still has to be called."""
        for process in self._processes:
            process.kill()

    def end(self, *, grace_s: float = 0.0, finished: Iterable[int] = ()) -> None:
        """End all processes and everything that they have started.

        Those that have `finished` may leave by themselves; `grace_s` after SIGTERM the others are killed.
        """
        until_s = time.monotonic() + grace_s
        for rank, process in enumerate(self._processes):
            if grace_s and rank not in finished and process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(max(0.0, until_s - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            end_group(process.pid)
        if self._processes:
            end_orphans()
            self.read_outputs()
        for process, file in zip(self._processes, getattr(self, "_error_files", ()), strict=False):
            Path(file).unlink(missing_ok=True)
            process.close()
        self._processes = []
        for connection in (*self.links, *self._outputs):
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._exits.close()


def signal_name(code: int) -> str:
    return next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
