"""The command line before torch is loaded, which takes seconds: an interrupt, and an environment that is not there."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import PROJECT
from programs import running, wait_until


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc, to see how far a process has come")
def test_an_interrupt_while_torch_is_being_loaded_is_one_line():
    with running([sys.executable, "-m", "fsdp_helpers", "train", "--strategy", "ddp"]) as process:
        assert wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), 60)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "fsdp_helpers: interrupted; nothing was started\n")


def test_a_missing_package_is_one_line_with_the_remedy():
    # -S: without site-packages, as a Python outside the environment is
    command = [sys.executable, "-S", "-m", "fsdp_helpers", "train"]
    done = subprocess.run(command, cwd=PROJECT, env={}, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("fsdp_helpers: No module named '") and "source .venv/bin/activate" in line
