"""The environment variables that torchrun sets for a rank, and one-line errors if they're wrong. No torch import."""

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TELLING = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")  # if one of these is set, the process is meant to be a rank
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LEAVE_S = 10.0  # after bad input, the other ranks give the first one on their machine this long to report it


@dataclass(frozen=True, kw_only=True)
class TorchrunRank:
    """This process's rank under torchrun, both among all ranks and among the ranks on its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def started_as_rank() -> bool:
    """Return True if any variable that only torchrun sets is present; `read_torchrun_rank` checks the rest."""
    return any(name in os.environ for name in TELLING)


def end_with_agent() -> None:
    """Have Linux kill this rank if its torchrun is killed; otherwise, it would keep training during the next run.

    This process doesn't notice if torchrun was killed while the process was starting, or on another system. In these
    cases, the lock on the checkpoint folder keeps the next run from writing at the same time.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(system := ctypes.CDLL(None), "prctl"):
        agent = os.getppid()
        system.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            sys.exit("torchrun was killed")


def read_torchrun_rank() -> TorchrunRank:
    """Return this process's `TorchrunRank`, read from the variables that torchrun sets.

    Raises ValueError if some are missing or contradict each other, or if a restart wouldn't work.
    """
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if missing:
        there = ", ".join(name for name in TELLING if name in os.environ)
        raise ValueError(
            f"the environment has {there} without {', '.join(missing)}; start ranks with torchrun, which sets them "
            f"all, or unset {there}"
        )
    torchrun = TorchrunRank(
        rank=_whole_number("RANK"),
        world_size=_whole_number("WORLD_SIZE"),
        local_rank=_whole_number("LOCAL_RANK"),
        local_world_size=_whole_number("LOCAL_WORLD_SIZE"),
    )
    _check_torchrun_rank(torchrun)
    _check_restarts()
    return torchrun


def _whole_number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ValueError(f"the environment has {name}={text!r}; it must be a whole number")
    return int(text)


def _check_torchrun_rank(torchrun: TorchrunRank) -> None:
    if torchrun.rank >= torchrun.world_size:
        raise ValueError(f"RANK is {torchrun.rank} and WORLD_SIZE is {torchrun.world_size}; ranks start at 0")
    if torchrun.local_rank >= torchrun.local_world_size:
        raise ValueError(
            f"LOCAL_RANK is {torchrun.local_rank} and LOCAL_WORLD_SIZE is {torchrun.local_world_size}; ranks start at 0"
        )
    if torchrun.local_world_size > torchrun.world_size:
        raise ValueError(
            f"LOCAL_WORLD_SIZE is {torchrun.local_world_size}, above the WORLD_SIZE of {torchrun.world_size}"
        )


def _check_restarts() -> None:
    """Raise ValueError if restarts would reuse torchrun's store, where gloo would find dead ranks' addresses."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            f"--max-restarts {restarts} needs a fresh store for every restart: "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )


def reports_bad_input() -> bool:
    """Return True if this process should report bad input: the only process, or the first of those on its machine.

    Bad input may be on one machine alone, for example if a folder is missing there.
    """
    rank = os.environ.get("RANK", "0")
    return "0" in (rank, os.environ.get("LOCAL_RANK")) or not rank.isdecimal()


def wait_for_first_rank() -> None:
    """Wait so that the machine's first rank can report it, because torchrun stops all ranks as soon as one exits."""
    time.sleep(LEAVE_S)
