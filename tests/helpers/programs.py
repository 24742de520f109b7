"""Programs that tests start: each in a process group of its own, and ended with all that belongs to it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fsdp_helpers.ranks.server import start_method

HELPERS = Path(__file__).resolve().parent
PATIENCE_S = 240.0  # for whatever has to come; only a test that fails waits so long
# Code for a child: its own highest use of memory. `ru_maxrss` would begin with what the process that started it had.
OWN_PEAK_KB = "next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))"
# Where the tests run under `nohup ... &`, interrupts are ignored, and every process inherits that.
RESTORE_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


needs_server = pytest.mark.skipif(start_method() == "spawn", reason="about the server, and FSDP_START_METHOD is spawn")


class Killed(BaseException):
    """The moment of a kill, where it is played within this process: no `except Exception` stops it."""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def has_ended(pid: int) -> bool:
    """Also if nobody has waited for it: an orphan stays listed where the first process of a container does not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shares_a_lock(pid: int) -> bool:
    """Whether the process holds a lock that several may hold. Linux alone can tell."""
    held = [line.split()[1:5] for line in Path("/proc/locks").read_text().splitlines()]
    return ["FLOCK", "ADVISORY", "READ", str(pid)] in held


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return bool(holds)


@contextmanager
def running_python(
    code: str, *, prelude: str = RESTORE_INTERRUPTS, variables: dict[str, str] | None = None, **settings
) -> Iterator[subprocess.Popen]:
    """A Python that can import the workers, in a session of its own, as a kernel is; ended with the block."""
    with running([sys.executable, "-c", prelude + textwrap.dedent(code)], variables=variables, **settings) as process:
        yield process


@contextmanager
def running(command: list[str], *, variables: dict[str, str] | None = None, **settings) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "PYTHONPATH": f"{HELPERS}{os.pathsep}{HELPERS.parents[1]}", **(variables or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **settings)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=200)
