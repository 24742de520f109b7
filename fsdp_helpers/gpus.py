"""Count and test this machine's GPUs in a separate process, set them up, and hide them from runs on the CPU.

torch uses a visible GPU even if all tensors are on the CPU: in `fully_shard` without a mesh, in a mesh's process group,
and in every optimizer step. GPUs can be hidden only before torch has looked for them, since torch and the driver
remember the result. So a process that may still run on the CPU never looks for GPUs itself.
"""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from fsdp_helpers.config import require_choice

VISIBLE, NONE = "CUDA_VISIBLE_DEVICES", ""  # the environment variable, and the value that hides every GPU
DRIVER = "libcuda.so.1"
TRIAL_S = 60.0
# Counting GPUs doesn't touch them. Computing does, so we try that only if ranks are about to use them.
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

_hidden: list[str | None] = []  # the variable's value before this process hid its GPUs


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process and its children may use."""

    count: int
    problem: str = ""  # why torch can't use them, in torch's words, without the final period


def find_gpus(num_wanted: int = 0) -> Gpus:
    """Count the GPUs; if `num_wanted` isn't 0 and there are at least that many, also try a computation on the first.

    The first call takes as long as importing torch does; without a driver, the call is instant.
    """
    return _ask_a_child(num_wanted, os.environ.get(VISIBLE)) if _may_have_gpus() else Gpus(0)


def choose_device(device: str, ranks_on_this_machine: int) -> str:
    """Turn "auto", "cpu" or "cuda" into "cpu" or "cuda"; "auto" means CUDA if there's a usable GPU for each rank.

    This process doesn't touch any GPU. Raises ValueError for any other device, and for "cuda" if there are more
    ranks than CUDA devices, or if torch can't use them.
    """
    require_choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cpu":
        return device
    gpus = find_gpus(ranks_on_this_machine)
    if device == "auto":
        return "cuda" if 1 <= ranks_on_this_machine <= gpus.count and not gpus.problem else "cpu"
    if ranks_on_this_machine > gpus.count:
        hidden = f" that {VISIBLE} doesn't hide" if are_hidden() else ""
        raise ValueError(
            f"{ranks_on_this_machine} ranks need {ranks_on_this_machine} CUDA devices, but this machine has {gpus.count}"
            f"{hidden}; use device 'cpu', or fewer ranks"
        )
    if gpus.problem:
        raise ValueError(f"torch can't use this machine's GPU ({gpus.problem}); use device 'cpu'")
    return device


def device_name(device: Any) -> str:
    """Return a description of a torch.device: the GPU's name, or the number of CPU cores."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {os.cpu_count()} cores"


def compute_repeatably() -> None:
    """Make the CUDA libraries return the same numbers in every run, and compute in fp32 when fp32 is requested.

    The notebooks compare runs bitwise or within 1e-5. By default, cuDNN may choose a different algorithm in the next
    run, cuBLAS may sum in a different order, and convolutions round their inputs to TF32, which keeps 10 of fp32's
    23 mantissa bits. These defaults are faster, so keep them for runs you don't need to compare. Call this before
    the first use of the GPU.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # NVIDIA's documentation: repeatable with several streams
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False  # torch's default


def hide_gpus() -> None:
    """Hide all GPUs from torch and from this process's children; call this before torch has looked for GPUs."""
    if os.environ.get(VISIBLE) != NONE:
        _hidden.append(os.environ.get(VISIBLE))
        os.environ[VISIBLE] = NONE


def unhide_gpus() -> None:
    """For processes started from now on, undo `hide_gpus`: restore the environment variable's earlier value."""
    if _hidden:
        before = _hidden.pop()
        if before is None:
            os.environ.pop(VISIBLE, None)  # the reader may have removed it in the meantime
        else:
            os.environ[VISIBLE] = before


def are_hidden() -> bool:
    """Return True if the environment variable hides all GPUs."""
    return os.environ.get(VISIBLE) == NONE


def _may_have_gpus() -> bool:
    """Return False if there can't be a GPU, without querying the driver."""
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
def _ask_a_child(num_wanted: int, visible: str | None) -> Gpus:
    """Run TRIAL in a child process and return its findings, which are cached by `num_wanted` and `visible`."""
    command = [sys.executable, "-c", TRIAL, str(num_wanted)]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}  # the child isn't a rank
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return Gpus(1, f"it didn't answer within {TRIAL_S:.0f} s")
    count, problem = (*done.stdout.splitlines(), "", "")[:2]
    if done.returncode and not problem:
        problem = f"the process that tried it exited with status {done.returncode}"
    return Gpus(int(count or 1), problem)
