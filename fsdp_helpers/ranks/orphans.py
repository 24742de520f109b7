"""Nothing that a rank starts outlives it, however either ends.

When a process dies, its children live on under a new parent: on Linux the nearest ancestor that asked to be one, a
"subreaper". Each rank asks, and so does the server that ranks are forked from; they end the processes that a rank
leaves behind. The server loads this module ahead of the first fork.
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
SERVER_OF = "FSDP_HELPERS_SERVER_OF"  # the server's parent, in the environment of the server alone
LOOK_S = 0.5  # between two looks at the server's parent
FOLDER = "fsdp_helpers-{}-"  # how the names of a process's private folders begin, by its id


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> set[int]:
    """Return the children of a process, including those it has adopted."""
    found = ""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += path.read_text()
    return set(map(int, found.split()))


def end_children(pid: int, spare: Iterable[int] = ()) -> None:
    """End the children of a process, and theirs as they become orphans, until none are left."""
    while left := children(pid) - set(spare):
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):  # another process waits for its own
                os.waitpid(child, 0)
        time.sleep(0.002)


def end_own_children() -> None:
    """End everything this process has started or adopted, since it's about to end itself."""
    for child in multiprocessing.active_children():
        child.kill()
    end_children(os.getpid())


def end_all_of(parent: int) -> None:
    """In the server of ranks: end everything below it, then remove the folders of its parent, which has ended.

    A rank removes its folder when it sees its parent end. It can't if the parent was killed while it ended its ranks.
    """
    end_own_children()
    for folder in Path(tempfile.gettempdir()).glob(FOLDER.format(parent) + "*"):
        shutil.rmtree(folder, ignore_errors=True)


def watch_over_ranks(parent: int) -> None:
    """In the server of ranks: adopt orphans, and end everything below it when its parent ends, even if it's killed."""
    os.setsid()  # Jupyter kills a kernel together with its process group
    adopt_orphans()
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of an orphan

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
    # Python's collector writes to every object that it looks at, and each page written to is copied: half a second for
    # two ranks. What the server has loaded, it passes over.
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain about what they still find at the end
