"""Starting the processes of ranks: forked from a server that has loaded torch, or spawned."""

import atexit
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from fsdp_helpers.ranks.allocator import malloc_tunables
from fsdp_helpers.ranks.orphans import WATCHED, end_children

START_METHODS = ("forkserver", "spawn")
NO_MAIN_GUARD = 113  # exit status of a rank whose import of the script came to `launch` again
IDLE_S = 180.0  # after so long without a launch the server ends, and gives its memory back
_loads_worker = False
_server_lock, _num_launches = threading.Lock(), 0
start_lock = threading.Lock()  # while ranks are started: what has just been forked is no orphan
_end_of_server: threading.Timer | None = None
_environment: dict[str, str] = {}  # as it was when the server was started
_server_device = "cpu"  # the kind of ranks that it was started for
PRELOADED = [
    "fsdp_helpers.ranks.orphans",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.profiler",
    "torch.utils.data",
    "torch._dynamo",
    "torchvision.datasets",
    "filelock",
    "tqdm",
]


def choose_start_method(start_method: str | None) -> str:
    """Return `forkserver` if the system has it (Windows does not), else `spawn`; ValueError for any other word."""
    available = [name for name in START_METHODS if name in multiprocessing.get_all_start_methods()]
    if start_method is None:
        return available[0]
    if start_method not in available:
        raise ValueError(f"unknown start method {start_method!r}; choose one of {', '.join(available)}")
    return start_method


@contextmanager
def ready_to_start(start_method: str, device: str) -> Iterator[None]:
    """Within the block, processes may be started that become ranks on `device`.

    CPU ranks get allocator settings that keep the buffers of their steps; on CUDA these are on the GPU. All of them
    block interrupts for good. Jupyter interrupts a kernel's whole process group, and the server, or a spawned rank,
    would die of that while it still loads torch.
    """
    settings = malloc_tunables() if device == "cpu" else nullcontext()
    if not hasattr(signal, "pthread_sigmask"):
        with settings:
            yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # first: starting it lets interrupts through again
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with settings:
            if start_method == "forkserver":
                _start_server(device)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)


def _start_server(device: str) -> None:
    """Start the server unless it runs; end one for the other kind of ranks first, if no other launch needs it."""
    global _server_device
    from multiprocessing import forkserver  # not on Windows

    with _server_lock:
        if _environment and _server_device != device and _num_launches == 1:
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # glibc reads its settings when a process starts
            _environment.clear()
    forkserver.set_forkserver_preload(PRELOADED)
    _tidy_up_on_sigterm()
    with _watching_its_parent():
        if not _environment:
            _environment.update(os.environ)
            _server_device = device
        forkserver.ensure_running()


@contextmanager
def _watching_its_parent() -> Iterator[None]:
    """Let a server that is started within the block find `orphans`, and watch over its ranks."""
    before = os.environ.get("PYTHONPATH")
    package = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, before]))
    os.environ[WATCHED] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[WATCHED]
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _tidy_up_on_sigterm() -> None:
    """Make SIGTERM remove this process's temporary folders before it ends it; the server's socket is in one of them.

    Jupyter ends every kernel that has launched in this way: a kernel that is asked to shut down first waits for all its
    children, and one of them, multiprocessing's resource tracker, waits for the kernel.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _tidy_up_and_end)


def _tidy_up_and_end(number: int, frame: object) -> None:
    if _num_launches == 0:
        atexit._run_exitfuncs()
    else:  # those of multiprocessing would wait for the ranks, which end when this process has ended
        shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def why_it_takes_long(start_method: str) -> str:
    """Return what the next launch has to do before its ranks start; "" if PyTorch is loaded already."""
    if start_method == "spawn":
        return "every rank loads PyTorch"
    return "" if _environment else "loading PyTorch once; later launches take a second"


@contextmanager
def server_in_use() -> Iterator[None]:
    """Mark the server as in use within the block. A while after the last launch it ends; the next one restarts it."""
    global _num_launches, _end_of_server
    with _server_lock:
        _num_launches += 1
        if _end_of_server is not None:
            _end_of_server.cancel()
    try:
        yield
    finally:
        with _server_lock:
            _num_launches -= 1
            _end_of_server = threading.Timer(IDLE_S, end_idle_server)
            _end_of_server.daemon = True
            _end_of_server.start()


def end_idle_server() -> None:
    """End the server that keeps torch loaded, unless ranks are running, which need it."""
    if "multiprocessing.forkserver" in sys.modules:  # else it was never started
        with _server_lock:
            if _num_launches == 0:
                sys.modules["multiprocessing.forkserver"]._forkserver._stop()
                _environment.clear()


def end_orphans() -> None:
    """End what ranks have left behind: below the server, and no process that this one has started."""
    if "multiprocessing.forkserver" in sys.modules:
        with start_lock:
            server = sys.modules["multiprocessing.forkserver"]._forkserver._forkserver_pid
            if server is not None:
                end_children(server, spare={child.pid for child in multiprocessing.active_children()})


def environment_changes() -> dict[str, str | None]:
    """Return variables set or removed (None) since the server started, which its forks would not see.

    Only differences are sent: each string that a rank keeps lies somewhere between the large buffers of its steps.
    """
    if not _environment:
        return {}
    differing = {
        name for name in _environment.keys() | os.environ.keys() if _environment.get(name) != os.environ.get(name)
    }
    return {name: os.environ.get(name) for name in differing - {"GLIBC_TUNABLES"}}


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold interrupts back until the end of the block: ranks are started, and stopped, all or none."""
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


@contextmanager
def loading_worker() -> Iterator[None]:
    """Within the block, this rank imports its worker's module, and `launch` refuses."""
    global _loads_worker
    _loads_worker = True
    try:
        yield
    finally:
        _loads_worker = False


def check_not_imported() -> None:
    """Exit or raise if this is a rank that only imports a program that launches: ranks must not launch ranks.

    A rank imports the program's script, which calls `launch` again if it has no main guard, and its worker's module.
    """
    if _loads_worker:
        raise RuntimeError(
            "the worker's module calls launch while a rank imports it; put the call under "
            '`if __name__ == "__main__":`, or into a function'
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        os._exit(NO_MAIN_GUARD)  # whoever started it is told


def main_guard_advice() -> str:
    script = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "the script")
    return (
        f"{script} has no main guard: every rank imports the script, and would launch ranks of its own; "
        'put what starts them under `if __name__ == "__main__":`'
    )
