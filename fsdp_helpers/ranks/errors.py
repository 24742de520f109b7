"""The errors that a launch can end with. A notebook shows only their messages, without a traceback."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWN_FILES = tuple(str(Path(__file__).with_name(name)) for name in ("rank.py", "launch.py"))


class RankError(RuntimeError):
    """A rank failed; the message has its number and its original traceback."""

    def __init__(self, rank: int, world_size: int, summary: str, details: str = "") -> None:
        self.rank, self.world_size, self.summary, self.details = rank, world_size, summary, details
        super().__init__(f"rank {rank} of {world_size} failed: {summary}" + (f"\n\n{details}" if details else ""))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows. The rank's traceback ends with the summary, so that isn't repeated."""
        if not self.details:
            return [f"RankError: {self}"]
        return [
            f"RankError: rank {self.rank} of {self.world_size} failed, with this traceback:",
            self.details,
        ]


class RankTimeout(TimeoutError):
    """Ranks were still running when time ran out; the message says where each one was, as `places` does."""

    def __init__(self, summary: str, places: list[str]) -> None:
        self.places = places
        super().__init__("\n".join([summary, *places]))

    def _render_traceback_(self) -> list[str]:
        return [f"RankTimeout: {self}"]


class Interrupted(KeyboardInterrupt):
    """You pressed the stop button, or ^C, while ranks were running; the message says what happened to them."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@contextmanager
def shown_by_message(*kinds: type[Exception]) -> Iterator[None]:
    """Within the block, a notebook shows only the message of these errors, which are written for people."""
    try:
        yield
    except kinds as error:
        lines = [f"{type(error).__name__}: {error}"]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # IPython looks for it
        raise


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the last line of a traceback, and the traceback from the worker on."""
    worker_frames = error.__traceback__
    while worker_frames and worker_frames.tb_frame.f_code.co_filename in OWN_FILES:
        worker_frames = worker_frames.tb_next
    details = "".join(traceback.format_exception(type(error), error, worker_frames)).rstrip()
    return traceback.format_exception_only(error)[-1].strip(), details
