"""The first of our modules that a rank's process imports: what it starts with, and its first moment."""

import gc
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setup:
    """What all ranks of a group start with."""

    world_size: int
    device: str
    folder: str  # private to the group: it meets there
    environment: dict[str, str | None]  # what the parent changed (None: removed) since its ranks are forked
    body: bytes  # the pickled function that each rank runs, as body(rank, setup, send, link)
    payload: Any = None  # and what it needs
    timeout_s: float | None = None  # how long a rank waits for the others in a collective

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}.txt")

    def line_file(self, rank: int) -> Path:
        return Path(self.folder, f"line-{rank}.txt")

    @property
    def meeting_point(self) -> str:
        return "file:///" + Path(self.folder, "meeting-point").as_posix().lstrip("/")


def begin_rank(rank: int, main: bytes, setup: Setup, links: list, outputs: list) -> None:
    """Spare Python's garbage collector what the server has loaded, then run `main`, a pickled function.

    The collector writes to every object that it looks at. Those of PyTorch lie in pages that this process shares with
    the server, and each page written to is copied: half a second of arithmetic for two ranks, before their first line.
    So this module imports little; unpickling `main` imports the others.
    """
    gc.freeze()
    pickle.loads(main)(rank, setup, links, outputs)
