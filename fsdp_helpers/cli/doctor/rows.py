"""A check of this machine, its outcome, and its line in the report. No torch import."""

from collections.abc import Callable
from dataclasses import dataclass

PASS, NOTE, FAIL, SKIP = "ok", "note", "WRONG", "-"


class Unfit(Exception):
    """This machine can't run the check, so it's skipped; the message says what's missing."""


@dataclass(frozen=True)
class Outcome:
    """The result of a check, in words. A check that passes but leaves some doubt produces a note."""

    passed: bool
    measured: str
    is_note: bool = False

    @property
    def result(self) -> str:
        if not self.passed:
            return FAIL
        return NOTE if self.is_note else PASS


def note(measured: str) -> Outcome:
    """Return the outcome of a check that passed but leaves some doubt."""
    return Outcome(True, measured, is_note=True)


@dataclass(frozen=True)
class Look:
    """A check and its title in the report; `run` returns the finding and, if something's wrong, the fix."""

    title: str
    run: Callable[[], Outcome]


@dataclass(frozen=True)
class Row:
    """The line in the report for a finished check."""

    check: str
    result: str
    measured: str


def look_at(look: Look) -> Row:
    """Run one check and return its row; if it raises an error, the row reports that."""
    try:
        outcome = look.run()
        result, measured = outcome.result, outcome.measured
    except Unfit as reason:
        result, measured = SKIP, str(reason)
    except Exception as error:  # a broken environment can break imports in any way
        result, measured = FAIL, f"{type(error).__name__}: {error}"
    return Row(look.title, result, " ".join(measured.split()))
