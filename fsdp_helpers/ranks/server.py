"""The server that ranks are forked from. It has already loaded torch, so a rank starts in a fraction of a second.

It loads only third-party modules, so an edit to your module, or to this package, takes effect at the next launch.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from fsdp_helpers.ranks.orphans import SERVER_OF, end_children

START_METHODS = ("forkserver", "spawn")
NO_MAIN_GUARD = 113  # exit status of a rank that reached `launch` again while importing the script
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.profiler",
    "torch.utils.data",
    "torch._dynamo",
    "torchvision.datasets",
    "filelock",
    "psutil",
    "tqdm",
    "fsdp_helpers.ranks.orphans",  # comes last, because it freezes everything loaded so far
]
# glibc reads these settings when a process starts; `keep_freed_memory` has the other half. All threads share one heap:
# gloo's would otherwise get heaps of their own, of at most 64 MB each. There's no per-thread cache of small blocks
# (tcache): an aligned allocation cuts a scrap off either end, and while a scrap is in such a cache, it isn't merged
# with the gap that the freed buffer leaves, so the gap stays slightly too small for the same buffer.
MALLOC_TUNABLES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"

start_lock = threading.RLock()  # held while ranks are started, so that a fresh one isn't taken for an orphan
is_rank = False  # `run_rank` sets it


def choose_start_method(start_method: str | None) -> str:
    """Return `start_method`, by default "forkserver". Raises ValueError for anything else, except "spawn"."""
    if start_method not in (None, *START_METHODS):
        raise ValueError(f"unknown start method {start_method!r}; choose one of {', '.join(START_METHODS)}")
    return start_method or START_METHODS[0]


@contextmanager
def ready_to_start(start_method: str) -> Iterator[None]:
    """Within the block, ranks can be started: the server is running, and the environment has what they need.

    The server and the ranks block interrupts for good. Jupyter interrupts a kernel's whole process group, which would
    kill the server, or a spawned rank, while it's still loading torch.
    """
    variables = {"GLIBC_TUNABLES": ":".join(filter(None, [MALLOC_TUNABLES, os.environ.get("GLIBC_TUNABLES")]))}
    if start_method == "forkserver":
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        variables |= {"PYTHONPATH": path, SERVER_OF: str(os.getpid())}
    resource_tracker.ensure_running()  # comes first, because starting it unblocks interrupts
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with start_lock:
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ.update(variables)
        try:
            if start_method == "forkserver":
                _tidy_up_on_sigterm()
                multiprocessing.set_forkserver_preload(PRELOADED)
                forkserver.ensure_running()
            yield
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)


def why_it_takes_long(start_method: str) -> str:
    """Return the reason why starting ranks will take long; "" if PyTorch is already loaded."""
    if start_method == "spawn":
        return "every rank loads PyTorch"
    return "" if forkserver._forkserver._forkserver_pid else "loading PyTorch once; later launches take a second"


def end_orphans() -> None:
    """End all processes that ranks have left behind: the server's children, except those that this process started."""
    with start_lock:
        if (server := forkserver._forkserver._forkserver_pid) is not None:
            end_children(server, spare={child.pid for child in multiprocessing.active_children()})


def _tidy_up_on_sigterm() -> None:
    """Make SIGTERM remove this process's temporary folders before it ends; the server's socket is in one of them.

    That's how Jupyter ends every kernel that has launched ranks. A kernel that's asked to shut down first waits for all
    of its children, and one of them, multiprocessing's resource tracker, waits for the kernel.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _tidy_up_and_end)


def _tidy_up_and_end(number: int, frame: object) -> None:
    for rank in multiprocessing.active_children():
        rank.kill()  # else multiprocessing waits for it
    atexit._run_exitfuncs()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold back interrupts until the end of the block, so that either all ranks are started or stopped, or none is."""
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


def check_not_a_rank() -> None:
    """Exit or raise if this process is a rank, because ranks must not launch ranks.

    A rank imports its worker's module, and also the program's script, which calls `launch` again if it has no main
    guard.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing itself checks this, too
        os._exit(NO_MAIN_GUARD)  # the parent is told by this exit status
    if is_rank:
        raise RuntimeError(
            "a rank calls launch, perhaps because its worker's module does; put the call under "
            '`if __name__ == "__main__":`, or into a function'
        )


def main_guard_advice() -> str:
    script = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "the script")
    return (
        f"{script} has no main guard: every rank imports the script, and would launch ranks of its own; "
        'put what starts them under `if __name__ == "__main__":`'
    )
