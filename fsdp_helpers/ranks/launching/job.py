"""The first of our modules that a rank's process imports: its job, and its first moment."""

import gc
import multiprocessing.connection
import pickle
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """The part of a launch that is the same for all its ranks."""

    payload: bytes  # the pickled worker and its arguments
    world_size: int
    device: str
    folder: str
    environment: dict[str, str | None]  # what the parent changed (None: removed) since its ranks are forked
    group_timeout_s: float | None  # how long a rank waits for the others in a collective
    all_report: bool = False  # how far they have come; else rank 0 alone

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}.txt")

    @property
    def meeting_point(self) -> str:
        return "file:///" + Path(self.folder, "meeting-point").as_posix().lstrip("/")


def begin_rank(body: bytes, rank: int, job: Job, sender: multiprocessing.connection.Connection) -> None:
    """Spare Python's garbage collector what the server has loaded, then run `body`, a pickled function.

    The collector writes to every object that it looks at. Those of PyTorch lie in pages that this process shares with
    the server, and each page written to is copied: half a second of arithmetic for two ranks, before their first line.
    So this module imports little; unpickling `body` imports the others.
    """
    gc.freeze()
    pickle.loads(body)(rank, job, sender)
