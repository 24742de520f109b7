"""Find out where ranks are: on a signal, each writes its Python stack to a file, no matter what it's doing."""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from fsdp_helpers.ranks.errors import RUNS_CODE

FILE = "stack-{}.txt"  # the rank's number goes in the braces
ANSWER_S = 5.0  # at most, for all ranks to write their stacks; one that's stopped never does
POLL_S = 0.02
ENDS = (" in <module>\n", "...\n")  # of a complete stack: its outermost line, or the mark of one that's too deep
LIBRARY = re.compile(r"^<frozen|/(python3[^/]*|(site|dist)-packages|torch)/")  # wherever they are installed
PACKAGE = re.compile(r"/fsdp_helpers/")


def write_on_request(folder: str, rank: int) -> None:
    """From now on, write the stack of this process's main thread to a file in `folder` when `ask` requests it."""
    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/{FILE.format(rank)}", "a"), all_threads=False)


def ask(folder: str, pids: Mapping[int, int]) -> dict[int, str]:
    """Ask ranks for their stacks, given their process IDs; return the stacks of all ranks that can answer."""
    files = {rank: Path(folder, FILE.format(rank)) for rank in pids}
    files = {rank: file for rank, file in files.items() if file.exists()}  # the signal would kill any other rank
    for rank, file in files.items():
        os.truncate(file, 0)  # removes what it wrote before
        os.kill(pids[rank], signal.SIGUSR1)
    until_s = time.monotonic() + ANSWER_S
    while not all(file.read_text().endswith(ENDS) for file in files.values()) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return {rank: file.read_text() for rank, file in files.items()}


def is_in_collective(stack: str) -> bool:
    """Return True if the innermost Python frame is in torch.distributed, whose collectives wait in C code."""
    return "/torch/distributed/" in stack.partition('", line')[0]


def describe(stack: str) -> str:
    """Describe a stack by its innermost frame outside the libraries, and the library function called from there.

    A frame outside this package, for example in the reader's module, takes precedence over one inside it.
    """
    called, ours = "", ""
    for path, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', stack):  # innermost first
        if RUNS_CODE.search(path):
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
