"""All failures by name, and the code that runs the broken or fixed version of a failure and judges the outcome."""

import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from fsdp_helpers.measuring.differing_collectives import log_collectives, read_log
from fsdp_helpers.ranks.errors import RankError, RankTimeout
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.failures.agents import AGENTS
from fsdp_helpers.teaching.failures.branches import BRANCHES
from fsdp_helpers.teaching.failures.crashes import CRASHES
from fsdp_helpers.teaching.failures.crashes_at_the_ends import CRASHES_AT_THE_ENDS
from fsdp_helpers.teaching.failures.entry import SYMPTOMS, Failure, Numbers, RankFunction, same_numbers
from fsdp_helpers.teaching.failures.files import FILES
from fsdp_helpers.teaching.failures.groups import GROUPS
from fsdp_helpers.teaching.failures.hangs import HANGS
from fsdp_helpers.teaching.failures.loaders import LOADERS
from fsdp_helpers.teaching.failures.loading import LOADING
from fsdp_helpers.teaching.failures.out_of_memory import MEMORY
from fsdp_helpers.teaching.failures.outside import OUTSIDE
from fsdp_helpers.teaching.failures.precision import PRECISION
from fsdp_helpers.teaching.failures.recipes import RECIPES
from fsdp_helpers.teaching.failures.saving import SAVING
from fsdp_helpers.teaching.failures.slow import SLOW
from fsdp_helpers.teaching.failures.texts import documented
from fsdp_helpers.teaching.failures.wrapped import WRAPPED
from fsdp_helpers.teaching.failures.wrong import WRONG
from fsdp_helpers.teaching.failures.wrong_data import WRONG_DATA
from fsdp_helpers.teaching.failures.wrong_start import WRONG_START

NUM_RANKS = 2
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/[\w/.-]*tmp\w+")
LIMIT_S = 240.0  # nothing here takes that long, even on a busy machine
RUN = (
    *HANGS,
    *CRASHES_AT_THE_ENDS,
    *AGENTS,
    *GROUPS,
    *CRASHES,
    *PRECISION,
    *BRANCHES,
    *OUTSIDE,
    *WRAPPED,
    *LOADERS,
    *MEMORY,
    *LOADING,
    *WRONG_START,
    *WRONG,
    *WRONG_DATA,
    *RECIPES,
    *SLOW,
    *SAVING,
    *FILES,
)
GALLERY = {
    failure.name: failure for symptom in SYMPTOMS for failure in (*RUN, *documented()) if failure.symptom == symptom
}


@dataclass(frozen=True)
class Seen:
    """The outcome of a run: each rank's numbers, or the error that ended it."""

    numbers: tuple[Numbers, ...] = ()
    error: str = ""
    last_words: str = ""  # what a library wrote before it ended the process


def find(name: str) -> Failure:
    """Return the failure with this name; if there is none, raise a ValueError that lists all names."""
    if name not in GALLERY:
        raise ValueError(f"no failure is called {name!r}; the names are {', '.join(GALLERY)}")
    return GALLERY[name]


def run(worker: RankFunction, group_timeout_s: float | None = None, stall_s: float | None = None) -> Seen:
    """Run a rank function on two CPU ranks, and return the outcome."""
    limits = {"timeout_s": LIMIT_S, "stall_s": stall_s, "group_timeout_s": group_timeout_s}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"rank-{rank}") for rank in range(NUM_RANKS)]
        try:
            found = launch(run_overheard, worker, paths, world_size=NUM_RANKS, device="cpu", progress=False, **limits)
        except RankError as error:
            summary = f"rank {error.rank} of {NUM_RANKS} failed: {without_frames(error.summary)}"
            return Seen(error=summary, last_words=last_words(paths[error.rank]))
        except RankTimeout as error:
            return Seen(error=str(error))
    return Seen(numbers=tuple(found))


def without_frames(text: str) -> str:
    """Return an error message without colors, temporary folders, or the stack frames that `dcp` errors quote."""
    text = TEMPORARY.sub("FOLDER", re.sub(r"\x1b\[\d*m", "", text))
    return re.sub(r'^ +File ".*\n(?: {4}.*\n?)*', "", text, flags=re.MULTILINE)


def run_overheard(rank: int, world_size: int, worker: RankFunction, paths: Sequence[Path]) -> Numbers:
    """Run `worker` as a rank function, and write its standard error, including C++ output, to this rank's file.

    Temporary files go next to that file, so that they're removed even if the rank is killed.
    """
    tempfile.tempdir = str(paths[rank].parent)
    with open(paths[rank], "wb") as file:
        os.dup2(file.fileno(), 2)
    return worker(rank, world_size)


def last_words(path: Path) -> str:
    """Return the message of an uncaught C++ exception in a rank's standard error, or "" if there is none."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.strip() for line in lines if line.lstrip().startswith("what():")), "")


def run_broken(failure: Failure) -> Seen:
    return run(failure.broken, failure.group_timeout_s, failure.stall_s)


def run_fixed(failure: Failure) -> Seen:
    return run(failure.fixed)


def shows_symptom(failure: Failure, seen: Seen) -> bool:
    """Return True if a broken run shows the failure's symptom: the expected error or wrong numbers."""
    if failure.says:
        return re.search(failure.says, f"{seen.error}\n{seen.last_words}") is not None
    right = failure.right()
    return bool(seen.numbers) and not all(same_numbers(found, right, failure.tolerance) for found in seen.numbers)


def comes_out_as_said(failure: Failure, seen: Seen) -> bool:
    """Return whether a broken run ends as expected: with the symptom, unless PyTorch is too old to show it."""
    return shows_symptom(failure, seen) == (not failure.not_in or torch_release() > failure.not_in)


def torch_release() -> TorchVersion:
    """Return the major and minor version of the installed PyTorch, such as 2.15."""
    return TorchVersion(".".join(torch.__version__.split(".")[:2]))


def has_fix(failure: Failure) -> bool:
    """Return whether the installed PyTorch has the fix for the failure."""
    return not failure.since or torch_release() >= failure.since


def is_fixed(failure: Failure, seen: Seen) -> bool:
    """Return whether every rank has the right numbers."""
    right = failure.right()
    return bool(seen.numbers) and all(same_numbers(found, right, failure.tolerance) for found in seen.numbers)


def trace_broken(name: str) -> list[list[Collective]]:
    """Run a failure's broken function, and return each rank's collectives, including the one that never finished."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"rank-{rank}") for rank in range(NUM_RANKS)]
        stall_s = find(name).stall_s
        with suppress(RankError, RankTimeout):  # it's broken on purpose
            launch(run_logged, name, paths, world_size=NUM_RANKS, device="cpu", progress=False, stall_s=stall_s)
        return [read_log(path) for path in paths]


def run_logged(rank: int, world_size: int, name: str, paths: Sequence[Path]) -> Numbers:
    """Run a failure's broken function as a rank function, and log this rank's collectives to the rank's file."""
    with log_collectives(paths[rank]):
        return GALLERY[name].broken(rank, world_size)
