"""The line about memory, on a machine made of files."""

import os
from pathlib import Path

import pytest

from fsdp_helpers.teaching.page import machine_memory

GIB = 1024**3


@pytest.fixture
def proc(tmp_path, monkeypatch) -> Path:
    """Two kernels of which this process is one, a server of the other, and a program that is none."""
    monkeypatch.setattr(machine_memory, "PROC", tmp_path)
    monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable:    5242880 kB\n")  # 5 GiB
    me, kernel, server, editor = os.getpid(), 5001, 5002, 5003
    for pid, parent, command in (
        (me, 1, "ipykernel"),
        (kernel, 1, "ipykernel"),
        (server, kernel, "fork"),
        (editor, 1, "vi"),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a (name)) S {parent} 0")
        (folder / "cmdline").write_text(f"python\0-m\0{command}")
        (folder / "smaps_rollup").write_text("Rss: 9999999 kB\nPss:     1048576 kB\n")  # 1 GiB
    return tmp_path


def test_what_is_free_what_is_needed_and_who_holds_the_rest(proc):
    # 5 GiB = 5.37 GB; the other kernel and its server hold 1 GiB each, 2.15 GB
    assert machine_memory.describe_memory() == "Memory: 5.37 GB free; other kernels hold 2.15 GB."
    assert machine_memory.describe_memory(7 * 10**9) == (
        "Memory: 5.37 GB free, this notebook needs 7.00 GB; other kernels hold 2.15 GB "
        "(Running → Shut Down gives it back)."
    )
    assert "Shut Down" not in machine_memory.describe_memory(10**9)


def test_a_container_may_have_less(proc):
    (proc / "memory.max").write_text(f"{4 * GIB}\n")
    (proc / "memory.current").write_text(f"{3 * GIB}\n")
    assert machine_memory.available_bytes() == GIB
    (proc / "memory.max").write_text("max\n")
    assert machine_memory.available_bytes() == 5 * GIB


def test_nothing_is_said_where_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_memory, "PROC", tmp_path / "no-proc")
    assert machine_memory.describe_memory(7 * 10**9) == ""
