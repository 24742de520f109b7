"""What every checker does with a reader's answer: ask for it, call it, and refuse it in one line."""

from collections.abc import Callable
from numbers import Real

BEYOND_ALL = 1e300  # nothing counted here comes near; infinity and NaN are not below it


class NotYet(AssertionError):
    """The answer is missing or wrong; a notebook shows the message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not yet: {self}"]


def expect(holds: bool, message: str) -> None:
    """Raise NotYet with `message` unless it holds."""
    if not holds:
        raise NotYet(message)


def expect_answered(answer: object) -> None:
    """Raise NotYet for a starter that nobody has touched."""
    expect(answer is not None and answer is not ..., "replace the ... with your answer")


def expect_number(given: object) -> None:
    """Raise NotYet for what is no finite number: a text, a list, True."""
    expect_answered(given)
    is_number = isinstance(given, Real) and not isinstance(given, bool) and abs(given) < BEYOND_ALL
    expect(is_number, f"the answer is {in_short(given)}; a number is asked for")


def expect_whole(given: object) -> None:
    """Raise NotYet for what is no whole number; 3.0 is one."""
    expect_number(given)
    expect(given == int(given), f"the answer is {given}; only whole numbers count here")


def call(function: Callable | None, *arguments: object) -> object:
    """What the reader's function returns. NotYet where it is none, fails, or still returns the dots."""
    expect_answered(function)
    expect(callable(function), f"the answer is {in_short(function)}; a function is asked for")
    try:
        given = function(*arguments)
    except Exception as error:
        raise NotYet(f"called with {arguments}, your function fails: {error_line(error)}") from None
    expect_answered(given)
    return given


def error_line(error: BaseException) -> str:
    """An error's name and message, whatever the message looks like, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def in_short(value: object) -> str:
    """A value as it is shown in a message: its type and its beginning, in one line."""
    text = " ".join(repr(value).split())
    return f"a {type(value).__name__}, {text[:60]}{'...' if len(text) > 60 else ''}"
