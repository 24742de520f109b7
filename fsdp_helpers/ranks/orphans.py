"""Ending everything that a rank has started, however the rank and its parent end.

When a process dies, its children live on under a new parent. On Linux, that's the nearest ancestor that has registered
as a "subreaper". Each rank does, and so does the server that ranks are forked from; they end the processes that a rank
leaves behind. The server loads this module before its first fork.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
SERVER_OF = "FSDP_HELPERS_SERVER_OF"  # holds the id of the server's parent; set only in the server's environment
LOOK_S = 0.5  # between two checks that the server's parent is alive
FOLDER = "fsdp_helpers-{}-"  # how the names of a process's private folders begin; its id goes in the braces


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> set[int]:
    """Return the children of a process, including those it has adopted."""
    found = ""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended in the meantime
            found += path.read_text()
    return set(map(int, found.split()))


def end_children(pid: int, spare: Iterable[int] = ()) -> None:
    """End the children of a process, and their children once they're orphaned, until none are left."""
    while left := children(pid) - set(spare):
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):  # it's not a child of this process
                os.waitpid(child, 0)
        time.sleep(0.002)


def end_own_children() -> None:
    """End everything this process has started or adopted, since it's about to end itself."""
    for child in multiprocessing.active_children():
        child.kill()
    end_children(os.getpid())


def end_all_of(parent: int) -> None:
    """In the server of ranks: end everything below it, then remove the folders of its parent, which has ended.

    A rank removes the folder when it sees its parent end, but it can't if the parent was killed while ending its ranks.
    """
    end_own_children()
    for folder in Path(tempfile.gettempdir()).glob(FOLDER.format(parent) + "*"):
        shutil.rmtree(folder, ignore_errors=True)


def watch_over_ranks(parent: int) -> None:
    """In the server of ranks: adopt orphans, and end everything below it when its parent ends, even if it's killed."""
    os.setsid()  # Jupyter kills a kernel together with its process group
    adopt_orphans()
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # an orphan's

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        end_all_of(parent)
        os._exit(0)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
    # The server's main thread leaves as soon as its parent and all ranks have ended, perhaps before `watch` has.
    atexit.register(end_all_of, parent)


if os.environ.pop(SERVER_OF, None) == str(os.getppid()):
    watch_over_ranks(os.getppid())
    # Python's garbage collector writes to every object it visits, and each page that's written to is copied, which
    # takes half a second for two ranks. So the collector skips everything the server has loaded.
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise libraries complain about objects that still exist at exit
