"""Nothing that a rank starts outlives it, however either ends.

When a process dies, its children get a new parent: on Linux, the nearest ancestor that asked to be a "subreaper". Each
rank asks, and so does the server that ranks are forked from, so they can end whatever a rank leaves behind. On other
systems, a rank leads a process group, which is ended after it; Windows has neither.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
ON_LINUX = sys.platform == "linux"
WATCHED = "FSDP_HELPERS_SERVER_OF"  # the server's parent, in the environment of the server alone
LAST_S = 0.5  # for ranks to end by themselves, which removes their folder, before the server ends them


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below it."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with(parent: int) -> bool:
    """Have Linux kill this process when `parent` ends, for whatever reason; return False if it has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def children(pid: int) -> set[int]:
    """Return the children of a process, including those it has adopted."""
    if ON_LINUX and Path("/proc/self/task").exists():
        found = ""
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += path.read_text()
        return set(map(int, found.split()))
    import psutil  # every rank would read it

    with suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children()}
    return set()


def end_children(pid: int, spare: Iterable[int] = ()) -> None:
    """End the children of a process, and theirs as they become orphans, until none are left."""
    while left := children(pid) - set(spare):
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in left if pid == os.getpid() else ():
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        if pid != os.getpid():
            time.sleep(0.002)  # its parent waits for it


def end_own_children() -> None:
    """End everything this process has started or adopted, since it's about to end itself."""
    for child in multiprocessing.active_children():
        child.kill()
    if ON_LINUX:
        end_children(os.getpid())


def end_group(rank: int) -> None:
    """End what's left of the process group of `rank`, a process that has ended; the parent calls this."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)


def watch_over_ranks(parent: int) -> None:
    """In the server of ranks: adopt orphans, and end everything below it when its parent ends, even if it's killed."""
    os.setsid()  # Jupyter kills a kernel together with its process group
    adopt_orphans()
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of an orphan

    def watch() -> None:
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel, or the parent has ended
                select.select([os.pidfd_open(parent)], [], [])
        while os.getppid() == parent:
            time.sleep(LAST_S)
        time.sleep(LAST_S)
        end_children(os.getpid())
        os._exit(0)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


if (server_of := os.environ.pop(WATCHED, None)) == str(os.getppid()):  # the server loads this module ahead
    watch_over_ranks(int(server_of))
