"""Stack traces on demand: a rank that gets the signal writes its stack into a file, whatever it is doing."""

import faulthandler
import importlib.util
import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def as_faulthandler_writes(path: Path) -> str:
    """Return a path as it stands in a stack: `faulthandler` escapes what is not ASCII."""
    return str(path).encode("ascii", "backslashreplace").decode()


BODIES_OF_RANKS = tuple(
    as_faulthandler_writes(Path(__file__).with_name(name)) for name in ("cells.py", "worker.py", "rank.py")
)
PACKAGE = as_faulthandler_writes(Path(__file__).parents[1]) + os.sep
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
LIBRARIES = (
    "<frozen",
    *(
        as_faulthandler_writes(Path(folder)) + os.sep
        for folder in (sysconfig.get_path("stdlib"), *importlib.util.find_spec("torch").submodule_search_locations)
    ),
)
ANSWER_S = 5.0  # at most, for all ranks to write: one that is stopped never does
POLL_S = 0.02
CAN_ASK = hasattr(signal, "SIGUSR1") and hasattr(faulthandler, "register")  # not on Windows


@contextmanager
def written_on_request(file: Path) -> Iterator[None]:
    """Within the block, this process writes the stack of its main thread to `file` when it is asked."""
    if not CAN_ASK:
        yield
        return
    with open(file, "a") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def ask(stack_files: Mapping[int, Path]) -> None:
    """Ask these processes, or the ranks that they keep, for their stacks, and wait until each has written its file."""
    if CAN_ASK:
        for pid, file in stack_files.items():
            if file.exists():
                os.truncate(file, 0)  # of what it wrote before
            os.kill(pid, signal.SIGUSR1)
        until_s = time.monotonic() + ANSWER_S
        while not all(map(has_answered, stack_files.values())) and time.monotonic() < until_s:
            time.sleep(POLL_S)


def has_answered(stack_file: Path) -> bool:
    """Return True if a rank has written its stack since it was asked (a stopped one cannot), or if it cannot be asked.

    A stack is whole once it has come down to the body of a rank, or to the dots of a deep one.
    """
    if not CAN_ASK or not stack_file.exists():
        return True
    text = stack_file.read_text()
    return any(body in text for body in BODIES_OF_RANKS) or text.endswith("...\n")


def is_library(path: str) -> bool:
    """Return whether a file is Python's own, torch's, or of an installed package, wherever these are installed."""
    return path.startswith(LIBRARIES) or not PACKAGE_FOLDERS.isdisjoint(Path(path).parts)


def is_in_collective(stack_file: Path) -> bool:
    """Return whether a rank's innermost Python line is in torch's code for groups, which waits in C."""
    innermost = re.search(r'File "(.+)", line', stack_file.read_text() if stack_file.exists() else "")
    return innermost is not None and "torch/distributed/" in Path(innermost.group(1)).as_posix()


def describe(stack_file: Path) -> str:
    """Return the innermost line outside the libraries, and the library function it was waiting in.

    A line outside this package counts before one inside it: a reader's module before the exercise that called it.
    """
    if not CAN_ASK:
        return "was running; this system cannot ask it where"
    text = stack_file.read_text() if stack_file.exists() else ""
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
    called = in_package = None
    for path, line, function in frames:  # innermost first
        if path in BODIES_OF_RANKS:
            break
        if not is_library(path):
            where = f"{os.path.basename(path)} line {line}" + (f", in {function}" if function != "<module>" else "")
            place = f"was waiting in {called}(), called from {where}" if called else f"was at {where}"
            if not path.startswith(PACKAGE):
                return place
            in_package = in_package or place
        if function != "wrapper":
            called = function
    return in_package or ("was still starting" if not called else f"was waiting in {called}()")
