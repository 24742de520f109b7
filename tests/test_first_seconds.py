"""The command line before torch is loaded, which takes seconds: an interrupt, and an environment that is not there."""

import os
import signal
import subprocess
import sys

from leftovers import PROJECT
from programs import running, wait_until


def test_an_interrupt_while_torch_is_being_loaded_is_one_line(tmp_path):
    """A torch that takes as long as the test needs."""
    (tmp_path / "torch").mkdir()
    slow = "import pathlib, time\npathlib.Path(__file__).with_name('began').touch()\ntime.sleep(600)\n"
    (tmp_path / "torch" / "__init__.py").write_text(slow)
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"}
    command = [sys.executable, "-m", "fsdp_helpers", "train", "--strategy", "ddp"]
    with running(command, variables=paths) as process:
        assert wait_until((tmp_path / "torch" / "began").exists)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=240)
    assert (process.returncode, output, errors) == (130, "", "fsdp_helpers: interrupted; nothing was started\n")


def test_a_wrong_environment_is_told_before_torch_is_loaded(tmp_path):
    """Each rank would load it, and each again after a restart."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is being loaded')\n")
    variables = {**os.environ, "RANK": "0", "PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"}
    command = [sys.executable, "-m", "fsdp_helpers", "train", "--strategy", "ddp"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2 and done.stderr.startswith("fsdp_helpers: the environment has RANK without WORLD_SIZE")


def test_a_missing_package_is_one_line_with_the_remedy():
    # -S: without site-packages, as a Python outside the environment is
    command = [sys.executable, "-S", "-m", "fsdp_helpers", "train"]
    done = subprocess.run(command, cwd=PROJECT, env={}, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("fsdp_helpers: No module named '") and "source .venv/bin/activate" in line
