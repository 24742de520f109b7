"""The server that ranks are forked from: it has loaded torch, so that a rank starts in a fraction of a second.

It holds third-party modules only: an edit to your module, or to this package, takes effect from the next launch on.
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
NO_MAIN_GUARD = 113  # exit status of a rank whose import of the script came to `launch` again
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
    "fsdp_helpers.ranks.orphans",  # the last one: it freezes what there is
]
# glibc reads these settings when a process starts; see `keep_freed_memory`, the other half of them. One heap for all threads: gloo's
# would have heaps of their own, of at most 64 MB each. No cache of small blocks for each thread (tcache): an aligned
# allocation cuts a scrap off either end; a scrap that lies in such a cache is not joined with the gap of the freed
# buffer again, and the gap stays a little too small for the same buffer.
MALLOC_TUNABLES = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"

start_lock = threading.RLock()  # while ranks are started: what has just been forked is no orphan
is_rank = False  # `run_rank` sets it


def choose_start_method(start_method: str | None) -> str:
    """Return `start_method`, by default "forkserver"; ValueError for a word that is neither that nor "spawn"."""
    if start_method not in (None, *START_METHODS):
        raise ValueError(f"unknown start method {start_method!r}; choose one of {', '.join(START_METHODS)}")
    return start_method or START_METHODS[0]


@contextmanager
def ready_to_start(start_method: str) -> Iterator[None]:
    """Within the block, processes may be started that become ranks; the server runs.

    It and they block interrupts for good. Jupyter interrupts a kernel's whole process group, and the server, or a
    spawned rank, would die of that while it still loads torch.
    """
    variables = {"GLIBC_TUNABLES": ":".join(filter(None, [MALLOC_TUNABLES, os.environ.get("GLIBC_TUNABLES")]))}
    if start_method == "forkserver":
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        variables |= {"PYTHONPATH": path, SERVER_OF: str(os.getpid())}
    resource_tracker.ensure_running()  # first: starting it lets interrupts through again
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
    """Return the reason why the next start of ranks takes long; "" if PyTorch is loaded already."""
    if start_method == "spawn":
        return "every rank loads PyTorch"
    return "" if forkserver._forkserver._forkserver_pid else "loading PyTorch once; later launches take a second"


def end_orphans() -> None:
    """End whatever ranks have left behind: below the server, but no process this one has started."""
    with start_lock:
        if (server := forkserver._forkserver._forkserver_pid) is not None:
            end_children(server, spare={child.pid for child in multiprocessing.active_children()})


def _tidy_up_on_sigterm() -> None:
    """Make SIGTERM remove this process's temporary folders before it ends; the server's socket is in one of them.

    Jupyter ends every kernel that has launched in this way: a kernel that is asked to shut down first waits for all its
    children, and one of them, multiprocessing's resource tracker, waits for the kernel.
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
    """Hold back interrupts until the end of the block, so that all ranks are started or stopped, or none."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts are the main thread's alone
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
    """Exit or raise if this is a rank, which may be importing a program that launches: ranks must not launch ranks.

    A rank imports the program's script, which calls `launch` again if it has no main guard, and its worker's module.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        os._exit(NO_MAIN_GUARD)  # whoever started it is told
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
