"""Checks for the tests of the runner: one that's right, and one for each way to go wrong. None needs a GPU."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from fsdp_helpers.cli.doctor.gpu import Check, Finding, Numbers, attempt, judged


def judge(numbers: Numbers) -> Iterator[Finding]:
    yield judged("one and one", numbers["sum"] == 2, "2", str(numbers["sum"]))


def measure() -> Iterator[tuple[str, int]]:
    yield "sum", 1 + 1


def fail() -> Iterator[tuple[str, int]]:
    yield "sum", 3
    raise ValueError("no second part")


def fail_in_part() -> Iterator[tuple[str, int]]:
    yield "sum", 2
    yield "quotient", attempt(lambda: 1 // 0)


def crash() -> Iterator[tuple[str, int]]:
    print("about to crash", flush=True)
    os.abort()
    yield "sum", 2


def hang() -> Iterator[tuple[str, int]]:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield "sum", 2
    yield "pid", sleeper.pid
    time.sleep(600)


def measure_nothing() -> Iterator[tuple[str, int]]:
    yield "total", 2


CHECKS = (
    Check(title="right", measure=measure, judge=judge),
    Check(title="fails", measure=fail, judge=judge),
    Check(title="fails in part", measure=fail_in_part, judge=judge),
    Check(title="crashes", measure=crash, judge=judge),
    Check(title="hangs", measure=hang, judge=judge, limit_s=8.0),
    Check(title="measures nothing", measure=measure_nothing, judge=judge, alone=True),
    Check(title="lacks a package", measure=measure, judge=judge, needs=("no_such_package",)),
    Check(title="needs GPUs", measure=measure, judge=judge, num_gpus=4),
    Check(title="right, after all", measure=measure, judge=judge),
)
