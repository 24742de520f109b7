"""Check a machine with GPUs: `python -m fsdp_helpers gpu-check`, a table to paste and its numbers as JSON."""

import math
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from fsdp_helpers.cli.doctor.facts import DESCRIBE, fact_lines
from fsdp_helpers.cli.doctor.one_check import ask_child, describe_process, marked_processes, run_check
from fsdp_helpers.cli.doctor.rows import FAIL, NOISE_BYTES, PASS, SKIP, Check, Row, count_results, markdown_table
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.gpus import VISIBLE, Gpus, are_hidden, find_gpus

PASTE = "-" * 20 + " paste from here " + "-" * 20
LEFT_BEHIND, NOTHING = "nothing is left behind", "no process, no memory of a GPU"


@dataclass(frozen=True)
class Report:
    """All rows, and a description of the machine."""

    rows: list[Row]
    facts: dict

    @property
    def passed(self) -> bool:
        return all(row.result != FAIL for row in self.rows)

    def lines(self) -> list[str]:
        """Return the lines to paste, between two markers."""
        failed = [row for row in self.rows if row.result == FAIL and row.details]
        ends = [line for row in failed for line in ("", f"{row.check}:", "```", *row.details, "```")]
        table = markdown_table(self.rows)
        return [PASTE, *table, *ends, "", count_results(self.rows) + ".", *fact_lines(self.facts), PASTE]

    def to_json(self) -> dict:
        return {"facts": self.facts, "rows": [asdict(row) for row in self.rows]}


def check_limit(limit_s: float) -> None:
    """Raise ValueError for a limit that is not a number of seconds above 0."""
    if not 0 < limit_s < math.inf:
        raise ValueError(f"--limit {limit_s:g}: give a number of seconds above 0")


def say_row(number: int, total: int, row: Row) -> None:
    """Print a line on standard error as soon as a check has ended, unless it did not run."""
    if row.result != SKIP:
        print(f"{number}/{total} {row.check}: {row.result}, {row.seconds:.0f} s", file=sys.stderr, flush=True)


def check_gpus(checks: Iterable[Check], limit_s: float, on_row: Callable[[int, int, Row], None]) -> Report:
    """Run all checks that this machine has GPUs for, one by one, and look for what they left behind."""
    checks, mark = list(checks), uuid.uuid4().hex
    gpus = find_gpus(1)  # and try the first
    if gpus.count == 0:
        return _without_gpus(checks)
    with sigterm_raised():
        facts = _describe(gpus, limit_s, mark)
        rows: list[Row] = []
        for check in checks:
            rows.append(run_check(check, gpus, limit_s, mark))
            on_row(len(rows), len(checks) + 1, rows[-1])
        rows.append(_look_for_leftovers(facts, gpus, limit_s, mark))
    on_row(len(rows), len(rows), rows[-1])
    return Report(rows, facts)


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """Within the block, SIGTERM raises SystemExit, so that the running check is ended and its files are removed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _without_gpus(checks: list[Check]) -> Report:
    from fsdp_helpers.training.worker import versions

    expected = [(check.title, check.expected) for check in checks] + [(LEFT_BEHIND, NOTHING)]
    return Report([Row(title, SKIP, _why_none(), what, 0.0) for title, what in expected], versions())


def _why_none() -> str:
    """Say why torch sees no GPU here."""
    import torch

    if are_hidden():
        return f"no GPU: {VISIBLE} hides them"
    if not torch.backends.cuda.is_built():
        return "no GPU: this torch is built for the CPU alone"
    return "no GPU here"


def _describe(gpus: Gpus, limit_s: float, mark: str) -> dict:
    """Have a child process describe the GPUs; if it gives no answer, return how it ended."""
    answer = ask_child(DESCRIBE, gpus, limit_s, mark)
    return answer.content or {"the GPUs cannot be described:": answer.ended}


def _look_for_leftovers(before: dict, gpus: Gpus, limit_s: float, mark: str) -> Row:
    """Look for processes of the checks that still run, and end them; and for GPU memory that was free before."""
    began_s = time.monotonic()
    left = marked_processes(mark)
    commands = tuple(describe_process(process) for process in left)
    for process in left:
        process.kill()
    after = _describe(gpus, limit_s, mark)
    taken = _taken_bytes(before, after)
    memory = "memory of the GPUs unknown" if taken is None else f"{format_bytes(taken)} of a GPU"
    passed = not left and taken is not None and taken <= NOISE_BYTES
    return Row(
        check=LEFT_BEHIND,
        result=PASS if passed else FAIL,
        measured=f"{len(left)} processes, {memory}",
        expected=NOTHING,
        seconds=time.monotonic() - began_s,
        details=commands,
    )


def _taken_bytes(before: dict, after: dict) -> int | None:
    """Return the largest drop in any GPU's free memory since before; None if that is unknown."""
    if not before.get("gpus") or not after.get("gpus"):
        return None
    pairs = zip(before["gpus"], after["gpus"], strict=True)
    return max(0, *(was["free_bytes"] - now["free_bytes"] for was, now in pairs))
