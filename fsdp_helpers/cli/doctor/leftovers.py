"""Find processes left over from earlier runs: fork servers and ranks whose notebook or torchrun has exited."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_helpers.cli.doctor.rows import Outcome, note

SERVER = ("multiprocessing.forkserver", "torch.distributed.fsdp")  # both are in our server's command line
RANK_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MOST_OF_COMMAND = 60  # characters


@dataclass(frozen=True)
class Orphan:
    """A process whose parent has exited."""

    pid: int
    age_s: float
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.age_s / 60:.0f} min old: {self.command})"


def processes_of_earlier_runs() -> Outcome:
    """Return a note that lists possible leftover processes; only their owner knows whether they're still needed."""
    left = list(orphans())
    if not left:
        return Outcome(True, "no processes from earlier runs")
    return note(f"{', '.join(map(str, left))}: left over from a program that has exited; stop what's yours")


def orphans() -> Iterator[Orphan]:
    """Yield each fork server and rank that seems to be left over from an earlier run."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to someone else
            program, *arguments = process.cmdline() or [process.name()]
            command = " ".join([Path(program).name, *arguments])
            is_server = all(word in command for word in SERVER)
            if (is_server or belongs_to_rank(process)) and is_orphan(process):
                what = "a fork server" if is_server else command[:MOST_OF_COMMAND]
                yield Orphan(process.pid, time.time() - process.create_time(), what)


def is_orphan(process: Any) -> bool:
    """Return True if the process is an orphan: its parent is process 1, or isn't a Python process.

    In a container, process 1 may be torchrun itself (`exec torchrun`), or the Python process that started the ranks.
    A rank's parent may also be a script that torchrun started; in that case, the script's parent counts.
    """
    parent = process.parent()
    if parent is None:
        return True
    if starts_ranks(parent):
        return False
    if parent.pid == 1:
        return True
    return is_orphan(parent) if belongs_to_rank(parent) else True


def starts_ranks(process: Any) -> bool:
    """Return True for torchrun, and for any Python process, such as a kernel or a script."""
    command = process.cmdline()
    return "python" in " ".join(command[:1]) or any(agent in word for word in command[:4] for agent in AGENTS)


def belongs_to_rank(process: Any) -> bool:
    """Return True if torchrun started this process or one of its ancestors."""
    import psutil

    try:
        return RANK_OF_TORCHRUN in process.environ()
    except psutil.AccessDenied:  # it's someone else's
        return False
