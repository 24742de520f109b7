"""Memory that is left on this machine, and what other kernels hold of it, from /proc; elsewhere nothing is said."""

import os
from collections.abc import Iterator
from pathlib import Path

from fsdp_helpers.quantities import KB, format_bytes

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")  # of a container, which may have less than the machine
KIB = 1024  # the unit in /proc, which calls it kB
WORTH_SAYING = 100_000 * KB


def describe_memory(needs_bytes: int | None = None) -> str:
    """Free memory, what a notebook needs, and what other kernels hold; nothing if the system does not say."""
    free_bytes = available_bytes()
    if free_bytes is None:
        return ""
    text = f"Memory: {format_bytes(free_bytes)} free"
    if needs_bytes is not None:
        text += f", this notebook needs {format_bytes(needs_bytes)}"
    held_bytes = sum(private_bytes(pid) for pid in other_kernels())
    if held_bytes > WORTH_SAYING:
        text += f"; other kernels hold {format_bytes(held_bytes)}"
        if needs_bytes is not None and free_bytes < needs_bytes:
            text += " (Running → Shut Down gives it back)"
    return f"{text}."


def available_bytes() -> int | None:
    """Return the bytes that a new process could take without swapping, in this container."""
    on_machine = _field(PROC / "meminfo", "MemAvailable:")
    if on_machine is None:
        return None
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    return on_machine if limit is None or used is None else min(on_machine, limit - used)


def other_kernels() -> Iterator[int]:
    """The processes of Jupyter kernels other than this one: kernels, their fork servers and ranks."""
    parents = {pid: parent for path in PROC.glob("[0-9]*") if (parent := _parent(pid := int(path.name))) is not None}
    kernels = {pid for pid in parents if pid != os.getpid() and "ipykernel" in _command(pid)}
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor not in kernels and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor in kernels:
            yield pid


def private_bytes(pid: int) -> int:
    """A process's memory, with its share of what it shares with others; 0 if that may not be read."""
    return _field(PROC / str(pid) / "smaps_rollup", "Pss:") or 0


def _field(path: Path, name: str) -> int | None:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(words[1]) * KIB for words in lines if words and words[0] == name), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is none, or it is "max"
        return None


def _parent(pid: int) -> int | None:
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it ended meanwhile


def _command(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_text()
    except OSError:
        return ""
