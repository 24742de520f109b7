"""A rank's keeper: nothing that a rank starts outlives it, however either ends.

When a process dies, its children live on under a new parent. On Linux a process may ask to be that parent (a "child
subreaper"), so every rank gets one, its keeper. It waits for the rank, ends whatever the rank left behind, children of
children included, and then ends as the rank did. Elsewhere the rank leads its own process group, which is ended after
it; on Windows, which has no such groups, a worker has to end what it starts.
"""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
TERM_S = 3  # after SIGTERM: a rank has this long before its keeper sends SIGKILL


def start_keeper(folder: str) -> None:
    """Fork the process that the parent started: it stays behind as the keeper, and the rank returns from here.

    When the parent is killed (a kernel restart), rank and keeper end at once and remove the private `folder`.
    """
    if hasattr(os, "setsid"):
        os.setsid()  # a signal to the parent's process group does not reach the keeper, which has work to do
    if not _adopt_orphans():
        _on_parents_end(lambda: _end_with_group(folder))
        return
    keeper = os.getpid()
    rank = os.fork()
    if rank == 0:
        if not end_with(keeper):
            os._exit(1)
        return
    status = _wait_for(rank, folder)
    _end_children()
    _leave_as(os.waitstatus_to_exitcode(status))


def end_with(parent: int) -> bool:
    """Have Linux kill this process when `parent` ends, in any way; return False if `parent` has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def end_group(rank: int) -> None:
    """End what is left of the process group of `rank`, a process that has ended; the parent calls this."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)


def _adopt_orphans() -> bool:
    if sys.platform != "linux" or not hasattr(os, "fork"):
        return False
    return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _wait_for(rank: int, folder: str) -> int:
    """Return the rank's exit status; until then, pass the parent's signals on to it."""

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(rank, number)

    def end_rank(*_: object) -> None:
        send(signal.SIGTERM)
        signal.alarm(TERM_S)

    signal.signal(signal.SIGTERM, end_rank)
    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    signal.signal(signal.SIGUSR1, lambda *_: send(signal.SIGUSR1))
    _on_parents_end(lambda: send(signal.SIGKILL))
    status = os.waitpid(rank, 0)[1]
    # A parent that is killed closes one pipe after the other: a rank may fail of it before the keeper can see it.
    patience_s = 0.5 if status else 0
    if multiprocessing.connection.wait([multiprocessing.parent_process().sentinel], timeout=patience_s):
        shutil.rmtree(folder, ignore_errors=True)  # not before: a rank that lives may put a file there meanwhile
    return status


def _end_children() -> None:
    """End all children, and theirs as they become orphans."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # there are none left
        if ended == 0:
            import psutil  # seldom needed, and every rank would read it

            for child in psutil.Process().children():
                os.kill(child.pid, signal.SIGKILL)  # a child's id is its own until it is waited for
            os.waitpid(-1, 0)


def _leave_as(exit_code: int) -> None:
    """Exit with the rank's exit status, or by the signal that ended it."""
    if exit_code < 0:
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank itself has left its memory image already
        with suppress(OSError):  # SIGKILL needs no default
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code % 256)


def _end_with_group(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    end_group(os.getpid())
    os._exit(1)


def _on_parents_end(then: Callable[[], None]) -> None:
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([parent])
        then()

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
