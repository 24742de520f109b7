"""The server that ranks are forked from: how it's started, and how it kills everything that a rank leaves behind.

It has already loaded torch, so a rank starts in a fraction of a second. It loads none of your modules, so an edit takes
effect at the next launch. When a process dies, its children live on under a new parent: on Linux, the nearest ancestor
that has registered as a "subreaper". The server and each rank do so, and kill the processes that they adopt.

On macOS, ranks are spawned instead, without a server (`start_method`).
"""

import atexit
import ctypes
import gc
import glob
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

NO_MAIN_GUARD = 113  # exit status of a rank that reached `launch` again while importing the script
PRELOADED = [  # `torch` and `torch.distributed.fsdp` bring most of the rest
    "fsdp_helpers.ranks.server",  # comes first, so that the server ends with its parent even while it loads torch
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torchvision.datasets",
    "filelock",
    "psutil",
]
# glibc reads these settings when a process starts; `keep_freed_memory` has the other half. All threads share one heap:
# gloo's would otherwise get separate heaps, of at most 64 MB each. There's no per-thread cache of small blocks: a
# scrap that's cut off an aligned buffer would stay there, and leave a gap slightly too small for the same buffer.
MALLOC_TUNABLES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
FOLDERS = "FSDP_HELPERS_FOLDERS"  # holds the pattern of the folders to remove; set only in the server's environment
FOLDER = "fsdp_helpers-{}-"  # how the names of a process's private folders begin; its id goes in the braces
LOOK_S = 0.5  # between two checks that the server's parent is alive
START_METHOD = "FSDP_START_METHOD"  # the variable that chooses how ranks start
MARK = (
    "FSDP_HELPERS_GROUP"  # in the environment of ranks, if no server adopts what they leave: the name of their folder
)

start_lock = threading.RLock()  # held while ranks are started, so that a fresh one isn't mistaken for an orphan
is_rank = False  # `run_rank` sets it


# ---------------------------------------------------------------- in the process that launches


def start_method() -> str:
    """Return how ranks start: "forkserver", or "spawn" if FSDP_START_METHOD says so, and by default on macOS.

    There, Apple's libraries may abort a process that was forked without a new program. A spawned rank is a new Python,
    which takes seconds to load torch. Raises ValueError if the variable has any other value.
    """
    chosen = os.environ.get(START_METHOD) or ("spawn" if sys.platform == "darwin" else "forkserver")
    if chosen not in ("forkserver", "spawn"):
        raise ValueError(f"{START_METHOD} is {chosen!r}, but should be forkserver or spawn")
    return chosen


def adopts() -> bool:
    """Return True if the server adopts what ranks leave behind: on Linux, if there is one."""
    return sys.platform == "linux" and start_method() == "forkserver"


def ensure_running() -> None:
    """Start the server unless it's running; it then loads torch while the notebook or the command does."""
    with ready_to_start(""):
        pass


@contextmanager
def ready_to_start(folder: str) -> Iterator[str]:
    """Start the server unless it's running or isn't needed; yield the method by which ranks start in the block.

    `folder` is that of the ranks, which serves as their mark. The server and the ranks block interrupts for good,
    because Jupyter interrupts a kernel's whole process group.
    """
    method = start_method()
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    tunables = ":".join(filter(None, [MALLOC_TUNABLES, os.environ.get("GLIBC_TUNABLES")]))
    variables = {"PYTHONPATH": path, "GLIBC_TUNABLES": tunables}
    if folder and not adopts():
        variables[MARK] = folder
    if method == "forkserver":
        variables[FOLDERS] = f"{glob.escape(tempfile.gettempdir())}/{FOLDER.format(os.getpid())}*"
    if sys.platform == "darwin":  # so that the server, and a rank's data loader, can fork
        variables["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"
    resource_tracker.ensure_running()  # comes first, because starting it unblocks interrupts
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with start_lock:
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ.update(variables)
        try:
            _tidy_up_on_sigterm()
            if method == "forkserver":
                multiprocessing.set_forkserver_preload(PRELOADED)
                forkserver.ensure_running()
            yield method
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)


def _tidy_up_on_sigterm() -> None:
    """Make SIGTERM remove this process's temporary folders before it exits; the server's socket is in one of them.

    That's how Jupyter stops every kernel that has launched ranks: when asked to shut down, a kernel first waits for
    its children, and one of them, multiprocessing's resource tracker, waits for the kernel.
    """

    def tidy_up_and_end(number: int, frame: object) -> None:
        for rank in multiprocessing.active_children():
            rank.kill()  # otherwise, multiprocessing waits for it
        atexit._run_exitfuncs()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, tidy_up_and_end)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold back interrupts until the end of the block, so that either all ranks are started or stopped, or none are."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets interrupts
        return
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if seen:
            signal.raise_signal(signal.SIGINT)


def end_orphans() -> None:
    """Kill all processes that ranks have left behind: the server's children, except those that this process started."""
    with start_lock:
        if (server := forkserver._forkserver._forkserver_pid) is not None:
            end_children(server, spare={child.pid for child in multiprocessing.active_children()})


def check_not_a_rank() -> None:
    """Exit or raise if this process is a rank that called `launch` while importing the script or worker module."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing checks this, too
        os._exit(NO_MAIN_GUARD)  # the parent is told by this exit status
    if is_rank:
        raise RuntimeError(
            "a rank calls launch, perhaps because its worker's module does; put the call under "
            '`if __name__ == "__main__":`, or into a function'
        )


# ---------------------------------------------------------------- in ranks and in the server


def end_own_children() -> None:
    """Kill everything this process has started or adopted, because the process itself is about to exit."""
    for child in multiprocessing.active_children():
        child.kill()
    end_children(os.getpid())


def end_children(pid: int, spare: Collection[int] = ()) -> None:
    """Kill a process's children, and their children once they're orphaned, until none are left."""
    while left := _children(pid) - set(spare):
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):  # it's not a child of this process
                os.waitpid(child, 0)
        time.sleep(0.002)


def _children(pid: int) -> set[int]:
    """Return the children of a process, including adopted children; none if there's no /proc.

    psutil would look at every process on the machine, which some clusters forbid (`hidepid`).
    """
    found = ""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended in the meantime
            found += path.read_text()
    return set(map(int, found.split()))


def end_marked(mark: str) -> None:
    """Kill everything that the ranks with this mark have started, and what that has started; for where no server adopts.

    A process's mark is in its environment, which it passes on. One that's started with another environment isn't found.
    """
    import psutil  # not above, because the server has to watch its parent first

    found = True
    while found:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or is someone else's
                if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                    process.kill()
                    found.append(process)
        psutil.wait_procs(found, timeout=1.0)


def lead_family(wait_for_parent: Callable[[], None], folders: str) -> None:
    """Adopt this process's orphaned descendants; when its parent exits or is killed, kill them all, then exit.

    Folders that match the pattern `folders` are removed, too. `wait_for_parent` returns when the parent exits.
    """
    os.setsid()  # Jupyter kills a kernel together with its process group
    if hasattr(system := ctypes.CDLL(None), "prctl"):
        system.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    mark = os.environ.get(MARK)

    def watch() -> None:
        wait_for_parent()
        try:
            if mark:
                end_marked(mark)
            remove_folders(folders)
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def remove_folders(folders: str) -> None:
    """Kill everything this process has started or adopted, then remove the folders that match a pattern."""
    end_own_children()  # first, because a rank that is still joining writes into its folder
    for folder in glob.glob(folders):
        shutil.rmtree(folder, ignore_errors=True)  # another process may be removing it, too


def _serve(parent: int, folders: str) -> None:
    """In the server: tidy up when the parent exits, and keep forked memory shared."""
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # an orphan's

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)

    lead_family(wait_for_parent, folders)
    # The server's main thread exits as soon as its parent and all ranks have ended, perhaps before its thread notices.
    atexit.register(remove_folders, folders)
    # Python's garbage collector writes to every object it visits, and each page that's written to is copied, which
    # takes half a second for two ranks. So the collector skips everything the server has loaded.
    own_pid = os.getpid()
    os.register_at_fork(before=lambda: os.getpid() == own_pid and gc.freeze())  # ranks inherit the hook
    atexit.register(gc.unfreeze)  # otherwise libraries complain about objects that still exist at exit


if (folders := os.environ.pop(FOLDERS, "")).endswith(f"{FOLDER.format(os.getppid())}*"):
    _serve(os.getppid(), folders)
