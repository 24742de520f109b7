"""Check a reader's answer: run it, then reject it with a one-line message or count it as solved."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from html import escape
from numbers import Real
from typing import Any

from fsdp_helpers.field_guide import cards

BEYOND_ALL = 1e300  # no answer comes near it; infinity and NaN aren't below it, so they're rejected


class NotYet(AssertionError):
    """Raised when an answer is missing or wrong; a notebook shows only the message, after an amber label.

    `failures` names files of the field guide that show the same; the notebook links to them above the message.
    """

    look = "\x1b[30;43m"  # black on amber
    has_shown_links = False

    def __init__(self, message: str, *failures: str) -> None:
        self.message, self.failures = message, failures
        super().__init__(f"{message} (failures: {', '.join(failures)})" if failures else message)

    def _render_traceback_(self) -> list[str]:
        if self.failures and not self.has_shown_links:  # IPython calls this twice: to show the error, and to save it
            self.has_shown_links = True
            show_links(self.failures)
        return [f"{self.look}Not yet:\x1b[0m {self}"]


class Crash(NotYet):
    """Raised when the answer fails with an error or can't be checked; a notebook shows a red label."""

    look = "\x1b[97;41m"  # white on red


class Solved(str):
    """The verdict on a correct answer; a notebook shows it in green, with the number of exercises solved."""

    count: str  # type: ignore[assignment]  # hides str.count, which isn't needed here

    def _repr_html_(self) -> str:
        look = "color:#15803d;font-weight:600"
        return f'<div style="{look}">✓ {escape(self)} ({self.count})</div>'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"✓ {self} ({self.count})")


_exercises: dict[str, set[str]] = {}  # by notebook number, the names of its checkers
_solved: set[str] = set()


def exercise(notebook: str) -> Callable:
    """Return a decorator for a notebook's checkers: it counts solved exercises and lets checkers raise only NotYet.

    An unexpected kind of answer mustn't cause a traceback through the checker, since that would show the solution.
    """

    def register(checker: Callable[..., str]) -> Callable[..., Solved]:
        _exercises.setdefault(notebook, set()).add(checker.__name__)

        @functools.wraps(checker)
        def check(*answer: Any, **settings: object) -> Solved:
            try:
                verdict = Solved(checker(*answer, **settings))
            except NotYet:
                raise
            except Exception as error:
                raise Crash(f"this answer can't be checked: {error_line(error)}") from None
            _solved.add(checker.__name__)
            all_of_them = _exercises[notebook]
            verdict.count = f"{len(_solved & all_of_them)} of {len(all_of_them)} solved"
            return verdict

        return check

    return register


def show_links(names: Sequence[str]) -> None:
    """Show links to these failures' files, since links in an error message can't be clicked."""
    from IPython.display import Markdown, display  # ranks import this module, too, but don't need IPython

    links = " · ".join(cards()[name].link for name in names)
    display(Markdown(f"The same failure as a script, with its fix: {links}"))


def expect(holds: bool, message: str, *failures: str) -> None:
    """Raise NotYet with `message` unless `holds` is true; `failures` names files of the field guide that show the same."""
    if not holds:
        raise NotYet(message, *failures)


def expect_answered(answer: Any) -> None:
    """Raise NotYet if the answer is None or still the `...` from the starter code."""
    expect(answer is not ..., "replace the ... with your answer")
    expect(answer is not None, "the answer is None; put yours in its place")


def expect_number(value: Any) -> None:
    """Raise NotYet unless the answer is a finite number; strings, lists and booleans aren't numbers here."""
    expect_answered(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool) and abs(value) < BEYOND_ALL  # type: ignore[operator]
    expect(is_number, f"the answer is {in_short(value)}; it should be a number")


def expect_whole_number(value: Any) -> None:
    """Raise NotYet unless the answer is a whole number; 3.0 counts as one."""
    expect_number(value)
    expect(value == int(value), f"the answer is {value}; it should be a whole number")


def call(function: Callable | None, *arguments: object, **named: object) -> Any:
    """Return the reader's result; raise NotYet if `function` fails, or if `function` or its result is `...` or None."""
    given = call_or_none(function, *arguments, **named)
    expect_answered(given)
    return given


def call_or_none(function: Callable | None, *arguments: object, **named: object) -> Any:
    """Call the reader's function as `call` does, but accept None as an answer."""
    expect_answered(function)
    expect(callable(function), f"the answer is {in_short(function)}; it should be a function")
    try:
        given = function(*arguments, **named)
    except Exception as error:
        shown = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in named.items())])
        shown = " ".join(shown.split())  # a tensor's repr has several lines
        raise Crash(f"called with ({shown}), your function fails: {error_line(error)}") from None
    expect(given is not ..., "replace the ... with your answer")
    return given


def error_line(error: BaseException) -> str:
    """Return an error's name and message as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def in_short(value: Any) -> str:
    """Return a one-line description of a value for a message: the start of its repr and its type."""
    text = " ".join(repr(value).split())
    return f"{text[:60]}{'...' if len(text) > 60 else ''} (type {type(value).__name__})"


# ---------------------------------------------------------------- fresh cases


FRESH_CASES = 5
DRAW = random.SystemRandom()  # unpredictable, even if a notebook sets a seed


def sizes_and_ranks(*edge_cases: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of a size (bytes or parameters) and a number of ranks that divides it, edge cases first."""
    yield from edge_cases
    for _ in range(FRESH_CASES):
        world_size = DRAW.randint(2, 64)
        yield world_size * DRAW.randint(1_000, 10**8), world_size
