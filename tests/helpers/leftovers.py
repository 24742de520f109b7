"""What tests leave behind: their processes, found by a variable that each of them inherits."""

import os
import signal
import sys
import time
import uuid
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[2]
SESSION_VARIABLE, SESSION_MARK = "FSDP_TESTS_SESSION", uuid.uuid4().hex
END_S = 60.0  # processes that are on their way out get this long, also on a busy machine


def process_ids() -> set[int]:
    """Every process of this machine that is visible here."""
    return set(psutil.pids())


def end_processes(pids: set[int]) -> None:
    """Kill what a test left, so that no later test meets it."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended meanwhile


def open_ranks() -> list:
    """The ranks that are open in this process; tests of a module may share them."""
    live = sys.modules.get("fsdp_helpers.ranks.live")
    return live.open_ranks() if live else []


def processes_of_this_session(shared: Set[int] = frozenset()) -> dict[int, str]:
    """Process id -> command of all that still runs: multiprocessing's two helpers of this process do not count."""
    deadline_s = time.monotonic() + END_S
    while found := {
        pid: command for pid, command in _marked_processes() if pid not in shared and not _is_own_helper(pid, command)
    }:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return found


def _marked_processes():
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended meanwhile, or is not ours to read
            if process.pid != os.getpid() and _environment_of(process).get(SESSION_VARIABLE) == SESSION_MARK:
                yield process.pid, " ".join(process.cmdline())


def _environment_of(process: psutil.Process) -> dict[str, str]:
    """While a program is being loaded it has none, for a moment; kernel threads, without a program, never have."""
    for _ in range(10):
        if (environment := process.environ()) or not process.exe():
            return environment
        time.sleep(0.01)
    return {}


def _is_own_helper(pid: int, command: str) -> bool:
    """The fork server's children have its command line too; they are not children of this process."""
    try:
        parent = psutil.Process(pid).ppid()
    except psutil.Error:
        return True
    return parent == os.getpid() and ("multiprocessing.forkserver" in command or "resource_tracker" in command)
