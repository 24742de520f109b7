"""Ranks that wait for one another forever: none of them sends a message, and none of them computes.

Seconds alone cannot tell. On a busy machine a correct program takes long, but it uses its share of the cores; ranks
that wait in a collective use none, or a hundredth of a core if they wait at the store. If a machine is so busy that a
rank gets no share at all, that rank is ready to run; one that waits is not.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.5  # between two looks
WAITING_SHARE = 0.03  # of a core: a rank that takes less only waits


class HangDetector:
    """A clock that runs while nothing moves. Without a limit (`stall_s`) it never runs out."""

    def __init__(self, stall_s: float | None) -> None:
        self.stall_s = stall_s
        self._since_s = self._looked_s = time.monotonic()
        self._cpu_s: dict[int, float] = {}
        self._ready: set[int] = set()  # those that had work at the last look

    def shorten(self, wait_s: float | None) -> float | None:
        """Return how long to wait for messages before the next look, and no longer than `wait_s`."""
        if self.stall_s is None:
            return wait_s
        return LOOK_S if wait_s is None else min(wait_s, LOOK_S)

    def moved(self) -> None:
        """Restart the clock: a rank has sent something."""
        self._since_s = time.monotonic()
        self._cpu_s = {}

    def lasts(self, pids: Sequence[int]) -> bool:
        """Return True once none of these processes, nor any that they started, has moved for `stall_s` seconds."""
        now_s = time.monotonic()
        if self.stall_s is None or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        spent_s = {pid: cpu_seconds(pid) for pid in pids}
        most_s = max((spent_s[pid] - self._cpu_s.setdefault(pid, spent_s[pid]) for pid in pids), default=0.0)
        # One that polls is caught awake now and then; one that gets no core has work at each look.
        had_work, self._ready = self._ready, {pid for pid in pids if is_ready_to_run(pid)}
        if most_s > WAITING_SHARE * self.stall_s or had_work & self._ready:
            self.moved()
            return False
        return time.monotonic() - self._since_s >= self.stall_s


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of all its living descendants."""
    import psutil  # not at the top: every rank would read it anew

    seconds = 0.0
    for member in family(pid):
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            seconds += times.user + times.system
    return seconds


def is_ready_to_run(pid: int) -> bool:
    """Return True if a thread of a process or of a descendant is running, waits for a core, or waits for the disk.

    Linux alone says so; elsewhere this is False.
    """
    for member in family(pid):
        with suppress(OSError):  # the process has ended meanwhile
            for thread in os.listdir(f"/proc/{member.pid}/task"):
                with suppress(OSError):  # or this thread of it
                    stat = Path(f"/proc/{member.pid}/task/{thread}/stat").read_text()
                    if stat.rpartition(") ")[2][0] in "RD":
                        return True
    return False


def family(pid: int) -> Iterator[Any]:
    """Yield a process and all its living descendants, as psutil sees them."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)
