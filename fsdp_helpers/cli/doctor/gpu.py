"""Check GPUs: each check is a measurement in a process of its own, and a verdict on the numbers that it returns.

`python -m fsdp_helpers doctor --gpu` runs the checks in `gpu_checks`. `make test-gpu`, in a clone, runs many more. A
check that crashes or hangs doesn't stop the others.
"""

import faulthandler
import importlib
import importlib.metadata as metadata
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from fsdp_helpers.cli.doctor.rows import FAIL, PASS, SKIP, Unfit
from fsdp_helpers.gpus import VISIBLE, are_hidden, find_gpus

PACKAGES = ("psutil", "tqdm", "torchvision", "safetensors", "transformers")  # that checks may need
AT_ONCE = max(1, min(6, (os.cpu_count() or 1) // 2))  # checks at the same time, unless they have to run alone
GRACE_S, SHORTEST_S = 10.0, 15.0  # to end a check's processes; to start a check at all
TAIL = 3000  # characters of a failed check's output
HEADER = ("| what | expected | measured | verdict |", "| --- | --- | --- | --- |")
CHILD = "import sys; from fsdp_helpers.cli.doctor.gpu import measure_alone; measure_alone(*sys.argv[1:])"
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    what: str
    expected: str
    measured: str
    result: str

    def __str__(self) -> str:
        cells = (self.what, self.expected, self.measured, self.result)
        return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def judged(what: str, passed: bool, expected: str, measured: str) -> Finding:
    return Finding(what, expected, measured, PASS if passed else FAIL)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measurement, which yields names and plain values as they're known, and the verdict on them."""

    title: str
    measure: Callable[[], Iterator[tuple[str, Any]]]
    judge: Callable[[Numbers], Iterable[Finding]]
    needs: Sequence[str] = ()  # packages
    num_gpus: int = 1
    limit_s: float = 90.0
    alone: bool = False  # it takes all of the memory, or measures time


@dataclass(frozen=True, kw_only=True)
class Result:
    """The numbers of a check that has run, its findings, and the end of its output if it failed."""

    title: str
    seconds: float = 0.0
    numbers: Numbers
    findings: tuple[Finding, ...]
    failure: str = ""


def count() -> int:
    """Return the number of GPUs. Raises Unfit if there are none, they're hidden, or torch is built without CUDA."""
    import torch

    if are_hidden():
        raise Unfit(f"no GPU: {VISIBLE} hides them")
    if not torch.backends.cuda.is_built():
        raise Unfit("no GPU: this version of torch is built for the CPU only")
    if not (gpus := find_gpus(1)).count:
        raise Unfit("no GPU here")
    return gpus.count


def packages() -> str:
    """Return which of PACKAGES are installed, and their versions."""
    return ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)


def version_of(name: str) -> str:
    if find_spec(name) is None:
        return "not installed"
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # only a folder on the search path
        return "installed"


def run_checks(
    modules: Sequence[str], folder: Path, *, limit_s: float = 600.0, only: Sequence[str] = (), say: Callable = print
) -> list[Result]:
    """Run the checks that each module lists in CHECKS, or those with titles in `only`, and return their results.

    `say` gets each line of the table as soon as it's known. `folder` gets each check's output, and record.json and
    record.md, which are written again after every check. After `limit_s` seconds, the remaining checks are left out.
    """
    import torch

    num_gpus, until_s = count(), time.monotonic() + limit_s
    folder.mkdir(parents=True, exist_ok=True)
    checks = [(module, check) for module in modules for check in load(module) if not only or check.title in only]
    results: dict[str, Result] = {}

    def run(one: tuple[str, Check]) -> None:
        module, check = one
        try:
            result = run_check(module, check, folder, num_gpus, until_s)
        except Exception as error:
            result = failed(check, {}, str(error), traceback.format_exc())
        results[check.title] = result
        done = [results[known.title] for _, known in checks if known.title in results]
        record = {"torch": torch.__version__, "packages": packages(), "checks": [asdict(one) for one in done]}
        write(folder / "record.json", json.dumps(record, indent=1))
        write(folder / "record.md", "\n".join([*HEADER, *(str(line) for one in done for line in one.findings)]))
        for finding in result.findings:
            say(str(finding))

    for line in HEADER:
        say(line)
    for alone, group in groupby(checks, key=lambda one: one[1].alone):
        with ThreadPoolExecutor(1 if alone else AT_ONCE) as pool:
            list(pool.map(run, group))
    return [results[check.title] for _, check in checks]


def load(module: str) -> Sequence[Check]:
    """Return a module's checks or, if it can't be imported, a single check that says why."""
    try:
        return importlib.import_module(module).CHECKS
    except Exception as error:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        if name in PACKAGES:
            return [Check(title=module, measure=lambda: iter(()), judge=lambda numbers: (), needs=[name])]
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        finding = Finding(module, "it can be imported", reason, FAIL)
        return [Check(title=module, measure=lambda: iter(()), judge=lambda numbers: [finding])]


def write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(f"{text}\n")
    unfinished.replace(path)


def failed(check: Check, numbers: Numbers, reason: str, details: str) -> Result:
    finding = Finding(check.title, "a result", reason, FAIL)
    return Result(title=check.title, numbers=numbers, findings=(finding,), failure=details)


def run_check(module: str, check: Check, folder: Path, num_gpus: int, until_s: float) -> Result:
    """Measure in a child process, which ends with everything it has started when its time is up, and judge."""
    began_s = time.monotonic()
    limit_s = min(check.limit_s, until_s - began_s)
    missing = [f"{name} isn't installed" for name in check.needs if find_spec(name) is None]
    if num_gpus < check.num_gpus:
        missing.append(f"it needs {check.num_gpus} GPUs")
    if limit_s < SHORTEST_S:
        missing.append("the time is up")
    if missing:
        return Result(
            title=check.title,
            numbers={},
            findings=(Finding(check.title, "", f"left out: {'; '.join(missing)}", SKIP),),
        )
    name = "".join(letter if letter.isalnum() else "-" for letter in check.title)
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-c", CHILD, module, check.title, str(path), str(limit_s)]
    with log.open("w") as output:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = child.wait(limit_s)
            reason = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"no result within {limit_s:.0f} s"
        finally:
            child.stdin.close()  # the child's thread sees it, and ends the child's family
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    numbers = json.loads(path.read_text()) if path.exists() else {}
    said = log.read_text(errors="replace")[-TAIL:]
    if reason:
        reason = f"{reason}: {(said.strip().splitlines() or ['no output'])[-1][:200]}"
    findings, problem = judge(check, numbers, reason)
    return Result(
        title=check.title,
        seconds=round(time.monotonic() - began_s, 1),
        numbers=numbers,
        findings=tuple(findings),
        failure=said if reason else problem,
    )


def judge(check: Check, numbers: Numbers, reason: str) -> tuple[list[Finding], str]:
    """Return the findings, and the traceback if the verdict itself failed, as it may if some numbers are missing."""
    broken = {name: value["error"] for name, value in numbers.items() if isinstance(value, dict) and "error" in value}
    findings, problem = [], ""
    try:
        for finding in check.judge({name: value for name, value in numbers.items() if name not in broken}):
            findings.append(finding)
    except Exception as error:
        problem = traceback.format_exc()
        reason = reason or ("" if broken else f"no verdict: {type(error).__name__}: {error}")
    for name, error in broken.items():
        findings.append(Finding(f"{check.title}: {name}", "a result", error.strip().splitlines()[-1][:200], FAIL))
    if reason:
        findings.append(Finding(check.title, "a result", reason, FAIL))
    return findings, problem if reason else ""


# ---------------------------------------------------------------- in the child


def measure_alone(module: str, title: str, path: str, limit_s: str) -> None:
    """Measure, and write what's known so far after each part. If the parent closes standard input, end the family."""
    from fsdp_helpers.ranks.server import end_own_children, lead_family

    lead_family(lambda: os.read(0, 1), "")
    faulthandler.dump_traceback_later(max(1.0, float(limit_s) - 2))  # where it hangs
    (check,) = [one for one in load(module) if one.title == title]
    status, numbers = 0, {}
    try:
        for name, value in check.measure():
            numbers[name] = value
            write(Path(path), json.dumps(numbers))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    end_own_children()
    os._exit(status)


def attempt(measure: Callable[[], Any]) -> Any:
    """Return what `measure` returns or, if it fails, the end of the traceback, so that other parts can go on."""
    try:
        return measure()
    except Exception:
        traceback.print_exc()
        return {"error": traceback.format_exc()[-TAIL:]}


# ---------------------------------------------------------------- the command line


def verdict(results: Sequence[Result]) -> str:
    findings = [finding for result in results for finding in result.findings]
    wrong, skipped = ([one.what for one in findings if one.result == result] for result in (FAIL, SKIP))
    if wrong:
        return f"{len(wrong)} of {len(findings)} wrong: {', '.join(wrong)}. Paste this table into an issue."
    return f"{len(findings) - len(skipped)} of {len(findings)} passed, {len(skipped)} left out."


def main(modules: Sequence[str], folder: Path, limit_s: float = 600.0, only: Sequence[str] = ()) -> int:
    """Run the checks, print the table, and return the exit status: 1 if anything is wrong, 2 if there's no GPU."""
    print(packages(), flush=True)
    try:
        count()
    except Unfit as reason:
        print(f"fsdp_helpers: {reason}", file=sys.stderr)
        return 2
    results = run_checks(modules, folder, limit_s=limit_s, only=only, say=lambda line: print(line, flush=True))
    print(f"\n{verdict(results)}")
    return int(any(finding.result == FAIL for result in results for finding in result.findings))
