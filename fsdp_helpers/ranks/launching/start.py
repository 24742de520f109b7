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
from multiprocessing.context import BaseContext

from fsdp_helpers.ranks.allocator import malloc_tunables

START_METHODS = ("forkserver", "spawn")
NO_MAIN_GUARD = 113  # exit status of a rank whose import of the script came to `launch` again
IDLE_S = 180.0  # after so long without a launch the server ends, and gives its memory back
RANK_NAME = "rank "  # and its number: the name of its process
_loads_worker = False
_server_lock, _num_launches = threading.Lock(), 0
_end_of_server: threading.Timer | None = None
_environment: dict[str, str] = {}  # as it was when the server was started
_server_device = "cpu"  # the kind of ranks that it was started for
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.profiler",
    "torch.utils.data",
    "torch._dynamo",
    "torchvision.datasets",
    "sklearn.datasets",
    "filelock",
    "tqdm",
]


def choose_start_method(start_method: str | None) -> str:
    """`forkserver` where the system has it (not on Windows), else `spawn`; ValueError for any other word."""
    available = [name for name in START_METHODS if name in multiprocessing.get_all_start_methods()]
    if start_method is None:
        return available[0]
    if start_method not in available:
        raise ValueError(f"unknown start method {start_method!r}; choose one of {', '.join(available)}")
    return start_method


@contextmanager
def ready_to_start(start_method: str, device: str) -> Iterator[BaseContext]:
    """Processes that are started within the block, with the context that it gets, become ranks on `device`.

    CPU ranks get settings of the host's allocator, which keep buffers of their steps; on CUDA these are on the GPU.
    All have interrupts held back for good. Jupyter interrupts a kernel's whole process group, and the server, or a
    spawned rank, would die of it while it still loads torch.
    """
    context = multiprocessing.get_context(start_method)
    settings = malloc_tunables() if device == "cpu" else nullcontext()
    if not hasattr(signal, "pthread_sigmask"):
        with settings:
            yield context
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # first: starting it lets interrupts through again
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with settings:
            if start_method == "forkserver":
                _start_server(device)
            yield context
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)


def _start_server(device: str) -> None:
    """Start the server, unless it runs; one for the other kind of ranks has to end, if no other launch needs it."""
    global _server_device
    from multiprocessing import forkserver  # not on Windows

    with _server_lock:
        if _environment and _server_device != device and _num_launches == 1:
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # glibc reads its settings when a process starts
            _environment.clear()
    if not _environment:
        _environment.update(os.environ)
        _server_device = device
    forkserver.set_forkserver_preload(PRELOADED)
    _tidy_up_on_sigterm()
    forkserver.ensure_running()


def _tidy_up_on_sigterm() -> None:
    """SIGTERM ends this process as before; but first its temporary folders go, that of the server's socket among them.

    So Jupyter ends every kernel that has launched: a kernel that is asked to leave first waits for all its children,
    and one of them, multiprocessing's resource tracker, waits for the kernel.
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
    """Return what the next launch has to do before its ranks start; nothing if PyTorch is loaded already."""
    if start_method == "spawn":
        return "every rank loads PyTorch"
    return "" if _environment else "loading PyTorch once; later launches take a second"


@contextmanager
def server_in_use() -> Iterator[None]:
    """Around a launch. A while after the last one the server ends, and the next launch starts it anew."""
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
    """End the server that holds torch loaded, unless ranks are running, which hold on to it."""
    if "multiprocessing.forkserver" in sys.modules:  # else it was never started
        with _server_lock:
            if _num_launches == 0:
                sys.modules["multiprocessing.forkserver"]._forkserver._stop()
                _environment.clear()


def environment_changes() -> dict[str, str | None]:
    """Return variables set or removed (None) in this process since the server started; its forks would not see them.

    Only what differs travels: each string that a rank keeps lies somewhere between the large buffers of its steps.
    """
    if not _environment:
        return {}
    differing = {
        name for name in _environment.keys() | os.environ.keys() if _environment.get(name) != os.environ.get(name)
    }
    return {name: os.environ.get(name) for name in differing - {"GLIBC_TUNABLES"}}


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """An interrupt that comes within the block counts after it: ranks are started, and stopped, all or none."""
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
    """Called by `launch`: end, or refuse, where a rank only imports what launches, else ranks would launch ranks.

    A rank imports the program's script, which comes to `launch` again where it has no main guard, and its worker's
    module.
    """
    if _loads_worker:
        raise RuntimeError(
            "the worker's module calls launch while a rank imports it; put the call under "
            '`if __name__ == "__main__":`, or into a function'
        )
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing itself asks
        if process.name.startswith(RANK_NAME):
            os._exit(NO_MAIN_GUARD)
        raise RuntimeError(main_guard_advice())


def main_guard_advice() -> str:
    script = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "the script")
    return (
        f"{script} has no main guard: every rank imports the script, and would launch ranks of its own; "
        'put what starts them under `if __name__ == "__main__":`'
    )
