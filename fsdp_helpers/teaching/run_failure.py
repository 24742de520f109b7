"""Run a script of the field guide on two CPU ranks, as torchrun would, and compare what it says with its card."""

import linecache
import os
import re
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from fsdp_helpers.field_guide import Card
from fsdp_helpers.ranks.errors import Answer, Failure
from fsdp_helpers.ranks.processes import Processes

NUM_RANKS = 2
LIMIT_S = 240.0  # nothing here takes that long, even on a busy machine
GRACE_S = 1.0  # after a rank has failed, for the others that fail by themselves
OWN_NUMBERS = "AssertionError: "  # what a script checks itself has the same numbers in every run


@dataclass(frozen=True)
class Outcome:
    """What each rank that failed said, with the script's line; and what ranks and their programs printed.

    Only the failures of the first GRACE_S seconds: then the ranks are stopped, as torchrun does.
    """

    errors: tuple[str, ...]
    printed: str


def run(name: str, code: str, late_s: float = 0.0) -> Outcome:
    """Run `code` as NAME.py on every rank; rank 1 begins `late_s` seconds later."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks meet here
    said: list[bytes] = []
    everyone = range(NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        body = partial(run_as_rank, code, f"{name}.py", folder, store.port, late_s)
        with Processes(body, NUM_RANKS, "cpu", lambda rank, stream, data: said.append(data)) as ranks:
            ranks.collect(everyone, time.monotonic() + LIMIT_S, GRACE_S)
            errors = [f"rank {rank}: {ranks.describe_end(rank)}" for rank in ranks.ends if rank not in ranks.answers]
            errors += [answer.failure.details for answer in ranks.answers.values() if answer.failure]
            if not errors and (hung := ranks.missing(everyone)):
                errors = [f"after {LIMIT_S} s, ranks {hung} hadn't finished"]
            ranks.end()  # at once: a rank that waits for another would wait for half an hour
    return Outcome(tuple(errors), b"".join(said).decode(errors="replace"))


def run_as_rank(code: str, file: str, folder: str, port: int, late_s: float, rank: int, *_: object) -> Answer:
    """Run a script as one of torchrun's ranks; what it writes into the current folder is removed with it."""
    meeting_point = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(meeting_point, TMPDIR=folder)
    os.chdir(folder)
    tempfile.tempdir = folder
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    time.sleep(late_s * (rank == 1))
    try:
        exec(compile(code, file, "exec"), {"__name__": "__main__", "__file__": file})
    except BaseException as error:  # `dcp` raises one that isn't an Exception
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"rank {rank} in `{frames[-1].line}`\n" if frames else ""
        said = "".join(traceback.format_exception_only(error)).strip()
        return Answer(0, failure=Failure(said.splitlines()[-1], where + said))
    return Answer(0, "")


def missing_lines(card: Card, outcome: Outcome) -> list[str]:
    """Return the lines under "What you see" that no rank said in a broken run.

    A card shows the failures that are causes: what a rank says that waited for another one varies, and isn't shown.
    """
    shown = [line.strip() for line in card.part("What you see").splitlines() if line.startswith("    ")]
    said = "\n".join([*outcome.errors, outcome.printed])
    return [
        line for line in shown if not (line in said if line.startswith(OWN_NUMBERS) else masked(line) in masked(said))
    ]


def masked(text: str) -> str:
    """Return a text without what differs from run to run: # for numbers and addresses, no colors, no folders."""
    text = re.sub(r"\x1b\[\d*m|(?<=\[)/\S*/", "", text)
    return re.sub(r"\d+", "#", re.sub(r"(127\.0\.0\.1|\[::1\])(:\d+)?", "#", text))
