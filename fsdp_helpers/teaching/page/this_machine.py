"""Describe this machine for `show.machine`: the device a notebook uses, idle GPUs, and free memory."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from fsdp_helpers.gpus import Gpus, choose_device, find_gpus, hide_gpus, unhide_gpus
from fsdp_helpers.quantities import KB, format_bytes

CGROUP = Path("/sys/fs/cgroup")  # a container's limits, which may be below the machine's
WORTH_SAYING = 100_000 * KB


def describe_memory(needs_bytes: int | None = None) -> str:
    """Return text saying how much memory is free, how much a notebook needs, and how much other kernels use."""
    free_bytes = available_bytes()
    text = f"Memory: {format_bytes(free_bytes)} free"
    if needs_bytes is not None:
        text += f", this notebook needs {format_bytes(needs_bytes)}"
    held_bytes = sum(map(private_bytes, other_kernels()))
    if held_bytes > WORTH_SAYING:
        text += f"; other kernels hold {format_bytes(held_bytes)}"
        if needs_bytes is not None and free_bytes < needs_bytes:
            text += " (Running → Shut Down frees that memory)"
    return f"{text}."


def available_bytes() -> int:
    """Return how many bytes a new process in this container could allocate without swapping."""
    on_machine = psutil.virtual_memory().available
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    return on_machine if limit is None or used is None else min(on_machine, limit - used)


def other_kernels() -> Iterator[psutil.Process]:
    """Yield other Jupyter kernels and all processes that they started, such as fork servers and ranks."""
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["cmdline"]):
        if process.pid not in own and "ipykernel" in " ".join(process.info["cmdline"] or ()):
            try:
                yield from [process, *process.children(recursive=True)]
            except psutil.Error:  # it has ended, or other users' processes are hidden
                continue


def private_bytes(process: psutil.Process) -> int:
    """Return a process's memory in bytes, including its share of the shared pages, or 0 if we can't read it."""
    try:
        memory = process.memory_full_info()
    except psutil.Error:
        return 0
    return getattr(memory, "pss", memory.uss)  # only Linux reports shares


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no such file, or it contains "max"
        return None


VARIABLE = "FSDP_DEVICE"  # overrides DEVICE in every notebook


def settle_device(device: str, num_ranks: int, *, fixed: bool = False) -> tuple[str, str]:
    """Return "cpu" or "cuda", and a sentence about idle GPUs (or ""); for "cpu", hide all GPUs from this process.

    Raises ValueError as `choose_device` does.
    """
    unhide_gpus()  # the reader may have changed the setting
    device = choose_device(device if fixed else os.environ.get(VARIABLE) or device, num_ranks)
    if device == "cuda":
        return device, ""
    said = "" if fixed else describe_idle(find_gpus(), num_ranks)
    hide_gpus()
    return device, said


def describe_idle(gpus: Gpus, num_ranks: int) -> str:
    """Return a sentence about idle GPUs: how to use them, or why they can't be used; "" if there are none."""
    if gpus.count == 0:
        return ""
    if gpus.problem:
        return f"This machine's GPU stays idle because torch can't use it: {gpus.problem}."
    has = f"This machine has {gpus.count} idle GPU{'s' * (gpus.count > 1)}"
    if gpus.count < num_ranks:
        return f"{has}, but {num_ranks} ranks need {num_ranks} GPUs, one for each rank. Notebooks 01 and 09 need only one GPU."
    how = f"unset {VARIABLE}" if os.environ.get(VARIABLE) else 'set `DEVICE = "cuda"` in the settings cell'
    return f"{has}. To use {'one for each rank' if num_ranks > 1 else 'one'}, {how} and run the notebook again."
