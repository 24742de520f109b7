"""A check of this machine, its outcome, and the table that people paste. No torch import."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fsdp_helpers.quantities import MB

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
NOISE_BYTES = 32 * MB  # a desktop or a neighbor may take them; a CUDA context takes more than 100 MB
HEADERS = ("check", "result", "measured", "expected", "seconds")


class Unfit(Exception):
    """This machine cannot run the check, which is therefore skipped; the message says what is missing."""


@dataclass(frozen=True)
class Outcome:
    """The result of a check: whether it passed, in words, and its numbers for plotting."""

    passed: bool
    measured: str
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One row: `run(num_gpus)` does the work, in a process of its own, on a machine with at least `gpus` GPUs."""

    title: str
    run: Callable[[int], Outcome]
    expected: str
    gpus: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table; `details` are the last lines that a failed check printed."""

    check: str
    result: str
    measured: str
    expected: str
    seconds: float
    values: dict[str, float] = field(default_factory=dict)
    details: tuple[str, ...] = ()


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, in Markdown; no cell breaks it."""
    lines = [HEADERS, ("---",) * len(HEADERS)]
    lines += [(row.check, row.result, row.measured, row.expected, f"{row.seconds:.1f}") for row in rows]
    return [f"| {' | '.join(map(_one_cell, line))} |" for line in lines]


def _one_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def count_results(rows: Sequence[Row]) -> str:
    """Count the results: "12 PASS, 1 FAIL, 9 SKIP"."""
    return ", ".join(f"{sum(row.result == result for row in rows)} {result}" for result in (PASS, FAIL, SKIP))
