"""The device of a notebook: the one the reader chose, and a note about idle GPUs."""

import os

from fsdp_helpers.gpus import Gpus, choose_device, find_gpus, hide_gpus, unhide_gpus

VARIABLE = "FSDP_DEVICE"  # overrides DEVICE in every notebook


def settle_device(device: str, num_ranks: int, *, fixed: bool = False) -> tuple[str, str]:
    """Return "cpu" or "cuda", and a sentence about idle GPUs, or ""; on "cpu", this process no longer sees any GPU.

    Raises ValueError as `choose_device` does.
    """
    unhide_gpus()  # the reader may have chosen anew
    device = choose_device(device if fixed else os.environ.get(VARIABLE) or device, num_ranks)
    if device == "cuda":
        return device, ""
    said = "" if fixed else describe_idle(find_gpus(), num_ranks)
    hide_gpus()
    return device, said


def describe_idle(gpus: Gpus, num_ranks: int) -> str:
    """Say that GPUs are idle and how to use them, or why they can't be used; "" if there are none."""
    if gpus.count == 0:
        return ""
    if gpus.problem:
        return f"The GPU of this machine stays idle, because torch cannot use it: {gpus.problem}."
    has = f"This machine has {gpus.count} GPU{'s' * (gpus.count > 1)}, idle here"
    if gpus.count < num_ranks:
        return f"{has}: {num_ranks} ranks need {num_ranks}, one each. Notebook 01, with one process, can use it."
    how = f"unset {VARIABLE}" if os.environ.get(VARIABLE) else 'set `DEVICE = "cuda"` in the cell of settings'
    return f"{has}: to use {'one for each rank' if num_ranks > 1 else 'one'}, {how} and run the notebook again."
