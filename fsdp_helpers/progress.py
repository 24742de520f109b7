"""One progress bar for any number of ranks: workers report their progress, and one process draws it with tqdm.

A worker calls `report(...)`. Under `launch`, its reports go to the parent process, which draws them. Under torchrun,
rank 0 draws its own reports. Otherwise, reports are dropped.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TextIO, TypeVar

from tqdm import tqdm

from fsdp_helpers.notebook import InPlace, is_notebook

SECONDS_BETWEEN_REPORTS = 0.1
SECONDS_BETWEEN_LINES = 5.0
# There's no rate in steps per second, because it would include the time for evaluating and saving.
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
Item = TypeVar("Item")

_sink: Callable[["Report"], None] | None = None
_last_report_s = 0.0
_in_lines = False


class Report(NamedTuple):
    """A rank's progress: `done` out of `total` steps in the task called `title`."""

    done: int
    total: int
    title: str
    details: str = ""
    loss: float | None = None
    memory: tuple[int, int] | None = None  # the bytes held between two steps and the peak within one, once known


def send_reports_to(sink: Callable[[Report], None] | None) -> None:
    """From now on, make `report(...)` call `sink` with a Report."""
    global _sink
    _sink = sink


def wants_report(done: int, total: int) -> bool:
    """Return True if a report would be drawn now (the first and last always are); check before computing details."""
    is_end = done in (0, total)
    return _sink is not None and (is_end or time.monotonic() - _last_report_s > SECONDS_BETWEEN_REPORTS)


def report(done: int, total: int, *what: Any) -> None:
    """Report that `done` out of `total` steps are finished. At most ten reports per second are sent.

    `what` has a Report's other fields. If the first step is slow, report 0 before it: the bar's clock starts at the
    first report.
    """
    global _last_report_s
    if wants_report(done, total):
        _last_report_s = time.monotonic()
        _sink(Report(done, total, *what))


@contextmanager
def reports_drawn() -> Iterator[None]:
    """Within the block, draw this process's reports unless they're already being sent elsewhere, as on a rank."""
    if _sink is not None:
        yield
        return
    with closing(ProgressBar()) as bar:
        send_reports_to(bar.update)
        try:
            yield
        finally:
            send_reports_to(None)


def with_progress(items: Sequence[Item], title: str) -> Iterator[Item]:
    """Yield `items` while drawing a progress bar for this process's work on them."""
    with reports_drawn():
        report(0, len(items), title)
        for done, item in enumerate(items, 1):
            yield item
            report(done, len(items), title)


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Show that the block is running and, in a notebook, how long it took. Use this if progress can't be measured."""
    with closing(ProgressBar()) as bar:
        bar.start(title)
        yield


@contextmanager
def in_lines() -> Iterator[None]:
    """Within the block, if there's no terminal to draw a bar in, print a line of progress every few seconds instead."""
    global _in_lines
    before, _in_lines = _in_lines, True
    try:
        yield
    finally:
        _in_lines = before


class ProgressBar:
    """One tqdm bar at a time: in a notebook, a line that updates in place and stays; in a terminal, tqdm's usual bar.

    Anywhere else (in a log file or CI, for example), it draws nothing, or prints lines; see `in_lines`.
    """

    def __init__(self) -> None:
        tqdm.get_lock()  # created now, because an interrupt during its creation would break tqdm
        self._page = _Page() if is_notebook() else None
        self._starting: str | None = None
        self._began_s = self._line_s = time.monotonic()
        self._title, self._bar = "", None

    def start(self, what: str) -> None:
        """Show immediately that work is starting; the first report replaces this line."""
        if self._bar is None and self._starting is None:
            self._starting = what
            self._draw(bar_format="{desc}", desc=f"{what}: starting")

    def running(self) -> None:
        """Show that the work is running, unless it has already sent a report."""
        if self._starting is not None:
            self._bar.set_description_str(f"{self._starting}: running")

    def update(self, report: Report, rank: int = 0) -> None:
        """Draw a report. Ranks run in lockstep, so only rank 0's reports are drawn."""
        if rank != 0:
            return
        if self._starting is not None or report.title != self._title or report.done < self._bar.n:
            self._begin(report)
        self._bar.set_postfix_str(report.details, refresh=False)
        self._bar.n = report.done
        self._bar.refresh()
        self._log(report)

    def _begin(self, report: Report) -> None:
        """Start a bar for a new piece of work, below the previous bar or in place of the "starting" line."""
        if self._bar is not None:
            self._bar.close()
            if self._page is not None and self._starting is None:
                self._page = _Page()
        self._starting, self._title, self._line_s = None, report.title, time.monotonic()
        self._draw(bar_format=BAR_FORMAT, desc=report.title, total=report.total, initial=report.done)

    def _draw(self, **settings: Any) -> None:
        # In a notebook, the bar's last state stays on the page.
        self._bar = tqdm(file=self._page, disable=None, leave=self._page is not None, **settings)

    def _log(self, report: Report) -> None:
        if _in_lines and self._bar.disable and time.monotonic() - self._line_s >= SECONDS_BETWEEN_LINES:
            self._line_s = time.monotonic()
            details = f", {report.details}" if report.details else ""
            print(f"{report.title}: {report.done} of {report.total}{details}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar; in a notebook, leave its last state or, if there were no reports, the elapsed time."""
        if self._bar is not None:
            if self._starting is not None:
                seconds = time.monotonic() - self._began_s
                self._bar.set_description_str(f"{self._starting}: ended after {seconds:.1f} s")
            self._bar.close()
        self._bar = self._starting = None


class _Page:
    """A file object that tqdm can write to as if to a terminal: one line of a notebook's output, updated in place."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._output, self._text = InPlace(), ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        text = text.replace("\x1b[A", "").strip("\r\n ")  # remove tqdm's cursor movements and line endings
        if text and text != self._text:
            self._text = text
            self._output.show(text)

    def flush(self) -> None:
        pass


def print_above_bar(text: str, stream: TextIO) -> None:
    """Print a line above the progress bar, if one is on screen."""
    with tqdm.external_write_mode(file=stream):
        print(text, file=stream, flush=True)
