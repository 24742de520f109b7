"""Look at this machine and its environment: `python -m fsdp_helpers doctor`, one line per check."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fsdp_helpers.cli.doctor import environment, machine
from fsdp_helpers.cli.doctor.rows import FAIL, PASS, SKIP, Outcome, Row, Unfit

WORDS = {PASS: "ok", FAIL: "WRONG", SKIP: "-"}


@dataclass(frozen=True)
class Look:
    """One line of the report: `run` looks, and says what it found and, if that is wrong, what to do about it."""

    title: str
    run: Callable[[], Outcome]


LOOKS = (
    Look("Python", environment.python_is_new_enough),
    Look("versions", environment.versions_fit),
    Look("lock", environment.versions_as_locked),
    Look("Jupyter", environment.jupyter_finds_this_environment),
    Look("cores", machine.cores),
    Look("memory", machine.memory),
    Look("shared memory", machine.shared_memory),
    Look("host name", machine.host_name_resolves),
    Look("ports", machine.ports_answer),
    Look("data", machine.data_can_be_used),
    Look("leftovers", machine.nothing_left_over),
    Look("GPU", machine.gpu_is_usable_or_absent),
    Look("two ranks", machine.two_ranks_add_up),
)


def look_at(look: Look) -> Row:
    """Return the row of one look; an error that it raises is what is wrong."""
    began_s = time.monotonic()
    try:
        outcome = look.run()
        result, measured = PASS if outcome.passed else FAIL, outcome.measured
    except Unfit as reason:
        result, measured = SKIP, str(reason)
    except Exception as error:  # a broken environment breaks imports in ways that nobody can list
        result, measured = FAIL, f"{type(error).__name__}: {error}"
    return Row(look.title, result, " ".join(measured.split()), "", time.monotonic() - began_s)


def examine(on_row: Callable[[Row], None]) -> list[Row]:
    """Look at everything in turn, and hand each row to `on_row` as soon as it is there."""
    rows = []
    for look in LOOKS:
        rows.append(look_at(look))
        on_row(rows[-1])
    return rows


def line(row: Row) -> str:
    """Return a row as people read it."""
    return f"{WORDS[row.result]:6}{row.check:14} {row.measured}"


def verdict(rows: list[Row]) -> str:
    """Return the last line: is this machine ready?"""
    wrong = [row.check for row in rows if row.result == FAIL]
    if not wrong:
        return "This machine is right for all notebooks on CPU ranks. For its GPUs: python -m fsdp_helpers gpu-check"
    return f"{len(wrong)} of {len(rows)} wrong: {', '.join(wrong)}. Fix the first one, and run doctor again."
