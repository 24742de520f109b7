"""One check in a process of its own, with a time limit: a hang or a crash there becomes a row of the table.

`python -m fsdp_helpers.cli.doctor.one_check TITLE NUM_GPUS PROBLEM FILE` is that process, which writes what it found to
FILE. It is told how many GPUs there are, and what torch said if it could not use them.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fsdp_helpers.cli.doctor.rows import FAIL, PASS, SKIP, Check, Outcome, Row, Unfit
from fsdp_helpers.ranks.gpus import Gpus, believe

MARK = "FSDP_GPU_CHECK"  # a variable that every process of a check inherits
NUM_DETAILS = 15  # last lines of a failure
PACKAGE_HOME = Path(__file__).resolve().parents[3]
MOST_OF_ERROR = 200  # characters of it in the table
END_S = 10.0  # processes that were killed have this long to go


def run_check(check: Check, gpus: Gpus, limit_s: float, mark: str) -> Row:
    """Return the row of `check`: its outcome, or why there is none."""
    if gpus.count < check.gpus:
        return Row(check.title, SKIP, f"needs {check.gpus} GPUs, this machine has {gpus.count}", check.expected, 0.0)
    began_s = time.monotonic()
    answer = ask_child(check.title, gpus, limit_s, mark)
    found = answer.content or {"result": FAIL, "measured": answer.ended, "values": {}}
    details = last_lines(answer.printed) if found["result"] == FAIL else ()
    seconds = time.monotonic() - began_s
    return Row(check=check.title, expected=check.expected, seconds=seconds, details=details, **found)


@dataclass(frozen=True)
class Answer:
    """A child's result (None if it failed), everything that it printed, and how it ended, in words."""

    content: dict | None
    printed: str
    ended: str


def ask_child(title: str, gpus: Gpus, limit_s: float, mark: str) -> Answer:
    """Run a check, or the description of the machine, in a child, which is ended after `limit_s` seconds."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        answer, output = Path(folder, "answer.json"), Path(folder, "output.txt")
        command = [sys.executable, "-m", __name__, title, str(gpus.count), gpus.problem, str(answer)]
        with open(output, "wb") as file, running(command, folder, mark, file) as process:
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
        printed = output.read_text(errors="replace")
        content = json.loads(answer.read_text()) if status == 0 and answer.exists() else None
    return Answer(content, printed, how_it_ended(status, printed, limit_s))


def how_it_ended(status: int | None, printed: str, limit_s: float) -> str:
    """Return the error that a child printed last, else its exit status; `status` None means it was still running."""
    if status is None:
        return f"still running after {limit_s:g} s"
    return last_error(printed) or f"ended with exit status {status}"


@contextmanager
def running(command: list[str], folder: str, mark: str, output: object) -> Iterator[subprocess.Popen]:
    """Run a child in its own session, with temporary files in `folder`; kill it with all that it started."""
    paths = os.pathsep.join(filter(None, [str(PACKAGE_HOME), os.environ.get("PYTHONPATH")]))
    # The bundled digits: no download, and the same data on every machine.
    variables = {**os.environ, "PYTHONPATH": paths, "TMPDIR": folder, MARK: mark, "FSDP_OFFLINE": "1"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        kill_with_children(process)


def kill_with_children(process: subprocess.Popen) -> None:
    """End a child that still runs, and then everything that it started; ranks also end by themselves without it."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=END_S)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the processes that the checks of this run started and that still exist."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or belongs to somebody else
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
    return found


def describe_process(process: psutil.Process) -> str:
    """Return a process's number and the start of its command."""
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    return f"{process.pid}, gone by now"


def last_error(printed: str) -> str:
    """Return the beginning of the line in which the last traceback ended, or ""."""
    lines = [line for line in printed.splitlines() if not line.startswith(" ")]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return textwrap.shorten(errors[-1], MOST_OF_ERROR, placeholder=" ...") if errors else ""


def last_lines(printed: str) -> tuple[str, ...]:
    """Return the end of what a check printed, without the name of the home folder: people paste it."""
    text = printed.replace(str(Path.home()), "~") if Path.home() != Path("/") else printed
    return tuple(text.rstrip().splitlines()[-NUM_DETAILS:])


def main(title: str, num_gpus: str, problem: str, answer: str) -> None:
    """Run one check, or describe the machine, in the child."""
    from fsdp_helpers.cli.doctor.facts import DESCRIBE, describe_gpus
    from fsdp_helpers.cli.doctor.gpu_checks import CHECKS

    believe(Gpus(int(num_gpus), problem))
    if title == DESCRIBE:
        content = describe_gpus()
    else:
        try:
            outcome = CHECKS[title].run(int(num_gpus))
            result = PASS if outcome.passed else FAIL
        except Unfit as reason:
            outcome, result = Outcome(True, str(reason)), SKIP
        content = {"result": result, "measured": outcome.measured, "values": outcome.values}
    Path(answer).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
