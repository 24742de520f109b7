"""Detecting ranks that wait for one another forever: none of them sends a message, and none of them computes.

The clock alone can't tell. On a busy machine, a correct program may take long, but it keeps using its share of the
cores. Ranks that wait in a collective use none of it, or a hundredth of a core if they wait at the store.
"""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

WAITING_SHARE = 0.03  # of a core; a rank that uses less is only waiting
LOOK_S = 0.5  # between two checks of the processes; a check takes milliseconds


class HangDetector:
    """A clock that runs while all ranks are idle; without a limit (`stall_s` is None), it never runs out."""

    def __init__(self, stall_s: float | None) -> None:
        self.stall_s = stall_s
        self.moved()

    def moved(self) -> None:
        """Restart the clock: a rank has sent something, or computed."""
        self._since_s, self._spent_s = time.monotonic(), {}

    def lasts(self, pids: Iterable[int]) -> bool:
        """Return True once none of these processes, nor any that they started, has computed for `stall_s` seconds."""
        if self.stall_s is None or time.monotonic() - self._since_s < LOOK_S:
            return False
        for pid in pids:
            spent_s = cpu_seconds(pid)
            if spent_s - self._spent_s.setdefault(pid, spent_s) > WAITING_SHARE * self.stall_s:
                self.moved()
                return False
        return time.monotonic() - self._since_s >= self.stall_s


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all of its living descendants, in seconds."""
    seconds = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                seconds += times.user + times.system
    return seconds
