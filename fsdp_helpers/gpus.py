"""The GPUs of this machine: counted and tried in a separate process, hidden from everything that runs on the CPU.

torch uses a visible GPU even if all tensors are on the CPU: in `fully_shard` without a mesh, in the group of a mesh, in
every step of an optimizer. Hiding works only before torch has looked, since torch and the driver remember the result.
So nothing here looks from a process that may still run on the CPU.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

VISIBLE, NONE = "CUDA_VISIBLE_DEVICES", ""  # the variable, and its value where no GPU is visible
DRIVER = "libcuda.so.1"
TRIAL_S = 60.0
# Counting leaves every GPU alone. Computing does not, so it is tried only if ranks are about to compute there.
TRIAL = """
import sys, torch
count, wanted = torch.cuda.device_count(), int(sys.argv[1])
print(count)
try:
    if count and not torch.cuda.is_available():
        torch.cuda.init()  # raises, and says why
    elif 0 < wanted <= count:
        torch.ones(1, device="cuda").add(1).item()
except Exception as error:
    print(str(error).splitlines()[0].partition(". ")[0])
"""

_hidden: list[str | None] = []  # what the variable was before this process hid its GPUs


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process and its children may use."""

    count: int
    problem: str = ""  # why torch cannot use them, in torch's words, without a full stop


def find_gpus(wanted: int = 0) -> Gpus:
    """Count the GPUs and, if there are `wanted` of them and at least one, compute on the first.

    The first call takes as long as torch takes to load; without a driver, calls cost nothing.
    """
    return _ask_a_child(wanted, os.environ.get(VISIBLE)) if _may_have_gpus() else Gpus(0)


def choose_device(device: str, ranks_on_this_machine: int) -> str:
    """Turn "auto", "cpu" or "cuda" into "cpu" or "cuda"; "auto" is CUDA if every rank gets a GPU that torch can use.

    This process doesn't touch a GPU here. Raises ValueError for any other word, and for "cuda" if there are more ranks
    than CUDA devices or torch cannot use them.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; choose one of auto, cpu, cuda")
    if device == "cpu":
        return device
    gpus = find_gpus(ranks_on_this_machine)
    if device == "auto":
        return "cuda" if 1 <= ranks_on_this_machine <= gpus.count and not gpus.problem else "cpu"
    if ranks_on_this_machine > gpus.count:
        hidden = f" that {VISIBLE} does not hide" if are_hidden() else ""
        raise ValueError(
            f"{ranks_on_this_machine} ranks need {ranks_on_this_machine} CUDA devices, but this machine has {gpus.count}"
            f"{hidden}; use device 'cpu', or fewer ranks"
        )
    if gpus.problem:
        raise ValueError(f"torch cannot use the GPU of this machine ({gpus.problem}); use device 'cpu'")
    return device


def hide_gpus() -> None:
    """Hide all GPUs from torch, which must not have looked yet, and from all processes started from here."""
    if os.environ.get(VISIBLE) != NONE:
        _hidden.append(os.environ.get(VISIBLE))
        os.environ[VISIBLE] = NONE


def unhide_gpus() -> None:
    """Undo `hide_gpus` for processes that start from now on; the reader's own setting stays."""
    if _hidden:
        before = _hidden.pop()
        if before is None:
            os.environ.pop(VISIBLE, None)  # the reader may have removed it meanwhile
        else:
            os.environ[VISIBLE] = before


def are_hidden() -> bool:
    """Return whether the environment hides every GPU."""
    return os.environ.get(VISIBLE) == NONE


def _may_have_gpus() -> bool:
    """Return False if there cannot be a GPU; this asks no driver."""
    import torch

    if are_hidden() or not torch.backends.cuda.is_built():
        return False
    if torch.version.hip:
        return True
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


@cache
def _ask_a_child(wanted: int, visible: str | None) -> Gpus:
    """Run the trial, once per wanted number and setting of visible devices."""
    command = [sys.executable, "-c", TRIAL, str(wanted)]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}  # it is not one of them
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return Gpus(1, f"it didn't answer within {TRIAL_S:.0f} s")
    count, problem = (*done.stdout.splitlines(), "", "")[:2]
    if done.returncode and not problem:
        problem = f"the process that tried it exited with status {done.returncode}"
    return Gpus(int(count or 1), problem)
