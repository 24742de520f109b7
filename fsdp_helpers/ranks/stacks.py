"""Where a rank is: each writes its Python stack into a file when it gets a signal, whatever it is doing."""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ANSWER_S = 5.0  # at most, for all ranks to write: one that is stopped never does
POLL_S = 0.02
LIBRARY = re.compile(r"^<frozen|/(python3[^/]*|(site|dist)-packages|torch)/")  # wherever they are installed
PACKAGE = re.compile(r"/fsdp_helpers/")
BODY = re.compile(r"/fsdp_helpers/ranks/(rank|launch|cells)\.py$")  # what a rank runs begins above it


@contextmanager
def written_on_request(file: Path) -> Iterator[None]:
    """Within the block, this process writes the stack of its main thread to `file` when it is asked."""
    with open(file, "a") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def ask(files: Mapping[int, Path]) -> dict[int, str]:
    """Ask processes, by their ids, for their stacks; return the content of each one's file, which may be empty."""
    started = {pid: file for pid, file in files.items() if file.exists()}
    for pid, file in started.items():
        os.truncate(file, 0)  # of what it wrote before
        os.kill(pid, signal.SIGUSR1)
    until_s = time.monotonic() + ANSWER_S
    while not all(_is_complete(file.read_text()) for file in started.values()) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return {pid: file.read_text() if pid in started else "" for pid, file in files.items()}


def _is_complete(stack: str) -> bool:
    return stack.endswith((" in <module>\n", "...\n"))  # the outermost line, or that of a deep stack


def is_in_collective(stack: str) -> bool:
    """Return whether the innermost Python line is in torch's code for groups, which waits in C."""
    innermost = re.search(r'File "(.+)", line', stack)
    return innermost is not None and "/torch/distributed/" in innermost.group(1)


def describe(stack: str) -> str:
    """Return the innermost line outside the libraries, and the library function it was waiting in.

    A line outside this package takes precedence over one inside it, such as a reader's module over our function.
    """
    called, ours = "", ""
    for path, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', stack):  # innermost first
        if BODY.search(path):
            break
        if PACKAGE.search(path) or not LIBRARY.search(path):
            where = f"{os.path.basename(path)} line {line}" + (f", in {function}" if function != "<module>" else "")
            place = f"was waiting in {called}(), called from {where}" if called else f"was at {where}"
            if not PACKAGE.search(path):
                return place
            ours = ours or place
        if function != "wrapper":
            called = function
    return ours or (f"was waiting in {called}()" if called else "was still starting")
