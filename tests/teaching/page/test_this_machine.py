"""The line about memory: on a simulated machine, and with a real process that looks like another kernel."""

import sys
from types import SimpleNamespace

import psutil
import pytest
from programs import running

from fsdp_helpers.teaching.page import this_machine

GIB = 1024**3


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """5 GiB are free, and another kernel and its server hold 1 GiB each."""
    monkeypatch.setattr(this_machine, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GIB))
    monkeypatch.setattr(this_machine, "other_kernels", lambda: ["kernel", "server"])
    monkeypatch.setattr(this_machine, "private_bytes", lambda process: GIB)
    return tmp_path


def test_what_is_free_what_is_needed_and_who_holds_the_rest(machine):
    # 5 GiB = 5.37 GB; the other kernel and its server hold 1 GiB each, 2.15 GB
    assert this_machine.describe_memory() == "Memory: 5.37 GB free; other kernels hold 2.15 GB."
    assert this_machine.describe_memory(7 * 10**9) == (
        "Memory: 5.37 GB free, this notebook needs 7.00 GB; other kernels hold 2.15 GB "
        "(Running → Shut Down frees that memory)."
    )
    assert "Shut Down" not in this_machine.describe_memory(10**9)
    for name, text in {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n"}.items():
        (machine / name).write_text(text)  # a container that has less
    assert "1.07 GB free" in this_machine.describe_memory()


CHILD = "import time; buffer = bytearray(2**26); print(flush=True); time.sleep(600)"
KERNEL = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_kernel_and_what_it_started():
    """A program with the name of a kernel in its command, and its child with 64 MiB; this process is not among them."""
    with running([sys.executable, "-c", KERNEL, "ipykernel"]) as kernel:
        kernel.stdout.readline()
        (child,) = psutil.Process(kernel.pid).children()
        found = {process.pid: process for process in this_machine.other_kernels()}
        assert {kernel.pid, child.pid} <= found.keys() and psutil.Process().pid not in found
        assert this_machine.private_bytes(found[child.pid]) > 2**26
    assert this_machine.private_bytes(found[child.pid]) == 0  # it has ended
