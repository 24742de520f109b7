"""How a rank reports a failure, and the errors raised from such a report. A notebook shows only their messages."""

import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# These files call what a rank runs; tracebacks leave them out.
RUNS_CODE = re.compile(r"/fsdp_helpers/ranks/(rank|launch|cells)\.py$")


@dataclass(frozen=True)
class Failure:
    """The failure of a worker, or of a cell."""

    summary: str  # the last line of the traceback
    details: str = ""
    when_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a message: the rank has joined, its worker or its cell has finished, or it has failed."""

    number: int | None  # of the message that it answers; None if the rank is about to exit
    value: Any = None
    failure: Failure | None = None
    collectives: Mapping[tuple, int] = field(default_factory=dict)  # how many so far, by group (its name and ranks)


class RankError(RuntimeError):
    """A rank failed; the message contains the rank's number and the original traceback."""

    def __init__(self, rank: int, world_size: int, summary: str, details: str = "") -> None:
        self.rank, self.world_size, self.summary, self.details = rank, world_size, summary, details
        super().__init__(f"rank {rank} of {world_size} failed: {summary}" + (f"\n\n{details}" if details else ""))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the summary (the first line of a long one, which its traceback repeats), then how."""
        said = self.summary.partition("\n")[0] if self.summary in self.details else self.summary
        return [f"RankError: rank {self.rank} of {self.world_size} failed: {said}", *filter(None, [self.details])]


class RankTimeout(TimeoutError):
    """Ranks were still running when time ran out; the message and `places` show where each rank was."""

    def __init__(self, summary: str, places: list[str]) -> None:
        self.places = places
        super().__init__("\n".join([summary, *places]))

    def _render_traceback_(self) -> list[str]:
        return [f"RankTimeout: {self}"]


class Interrupted(KeyboardInterrupt):
    """You pressed the stop button, or ^C, while ranks were running; the message says what happened to them."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def describe_error(
    error: BaseException, is_shown: Callable[[str], bool] = lambda file: not RUNS_CODE.search(file)
) -> tuple[str, str]:
    """Return the last line of a traceback, and the traceback, limited to files for which `is_shown` is true."""
    trace = traceback.TracebackException.from_exception(error)
    parts = [trace]
    for part in parts:  # the list grows during the loop, since causes have causes
        parts += filter(None, [part.__cause__, part.__context__])
        part.stack[:] = [frame for frame in part.stack if is_shown(frame.filename)]
    return traceback.format_exception_only(error)[-1].strip(), "".join(trace.format()).rstrip()


def list_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
