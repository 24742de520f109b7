"""What the tests' own fixtures promise: whoever leaves something is blamed, hangs end, interrupts arrive."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import PROJECT

TESTS = Path(__file__).parent
# Each of these is run by a pytest of its own, in which SIGINT is ignored from outside.
UNTIDY = """
import os, signal, subprocess, sys, tempfile, time
import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def test_leaves_a_process():
    print("LEFT", subprocess.Popen(SLEEP, start_new_session=True).pid)

def test_innocent():
    pass

@pytest.mark.timeout(2)
def test_hangs():
    print("LEFT", subprocess.Popen(SLEEP).pid)
    time.sleep(600)

def test_leaves_a_file():
    tempfile.mkdtemp(prefix="untidy-")

def test_innocent_too():
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("untidy-")]

def test_interrupts_arrive():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
"""


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and a shell's background do


@pytest.mark.long
def test_the_untidy_are_blamed_and_nobody_else(tmp_path):
    (tmp_path / "test_untidy.py").write_text(UNTIDY)
    options = ["-p", "conftest", "-c", PROJECT / "pyproject.toml", "-p", "no:cacheprovider", "-rA", "-s"]
    options += ["--basetemp", tmp_path / "inner"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path / "test_untidy.py"],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{PROJECT}"},
        preexec_fn=ignore_interrupts,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    lines = done.stdout.splitlines()
    outcomes = {re.search(r"::(\w+)", line)[1]: line.split()[0] for line in lines if re.match("[A-Z]+ .*::", line)}
    assert outcomes == {
        "test_leaves_a_process": "ERROR",  # of its clean-up: the test itself passed
        "test_innocent": "PASSED",
        "test_hangs": "FAILED",
        "test_leaves_a_file": "ERROR",
        "test_innocent_too": "PASSED",
        "test_interrupts_arrive": "PASSED",
    }, done.stdout
    assert "these processes were left, and are ended now" in done.stdout
    assert "Timeout (>2.0s)" in done.stdout
    pids = re.findall(r"LEFT (\d+)", done.stdout)
    assert len(pids) == 2 and not any(is_alive(pid) for pid in pids)


def is_alive(pid: str) -> bool:
    """True for a process that has not ended; one that has ended and is still listed has no environment any more."""
    try:
        return Path("/proc", pid, "environ").read_bytes() != b""
    except OSError:
        return False
