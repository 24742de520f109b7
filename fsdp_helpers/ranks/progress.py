"""One progress bar for any number of ranks: workers report, one process draws.

A worker calls `report(...)`. Where the reports go depends on what started it: the launcher sends them to the parent
process, torchrun's first rank draws them itself, and without either they are dropped.
"""

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

SECONDS_BETWEEN_REPORTS = 0.1
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_COUNTS = 1.0
# Steps in a second are left out: what is evaluated or saved between two steps would count as a slow step.
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
Item = TypeVar("Item")

_sink: Callable[..., None] | None = None
_last_report_s = 0.0
_in_lines = False


def send_reports_to(sink: Callable[..., None] | None) -> None:
    """From now on, `report(done, total, title, details, loss, memory)` calls `sink` with its arguments."""
    global _sink
    _sink = sink


def wants_report(done: int, total: int) -> bool:
    """Return True if a report would be drawn now (the first and the last always are); ask this before computing costly details."""
    is_end = done in (0, total)
    return _sink is not None and (is_end or time.monotonic() - _last_report_s > SECONDS_BETWEEN_REPORTS)


def report(
    done: int,
    total: int,
    title: str,
    details: str = "",
    loss: float | None = None,
    memory: tuple[int, int] | None = None,
) -> None:
    """Report that `done` of `total` steps are done; at most ten reports a second get through.

    `memory` has the bytes this rank holds between two steps, and its peak within one, once they're known.

    If a first step takes long, report 0 before it: the bar's clock starts at the first report.
    """
    global _last_report_s
    if wants_report(done, total):
        _last_report_s = time.monotonic()
        _sink(done, total, title, details, loss, memory)


def drawn(
    items: Iterable[Item], total: int, title: str, details: Callable[[Item], str] = lambda item: ""
) -> Iterator[Item]:
    """Yield `items` with a progress bar in this process; `details` describes the current one."""
    bar, done, last_s = ProgressBar(), 0, 0.0
    try:
        bar.update(done, total, title)
        for item in items:
            if time.monotonic() - last_s > SECONDS_BETWEEN_REPORTS:
                last_s = time.monotonic()
                bar.update(done, total, title, details(item))
            yield item
            done += 1
        bar.update(done, total, title)
    finally:
        bar.close()


@contextmanager
def counted(what: str) -> Iterator[None]:
    """Show how many seconds the block has taken so far, for work whose progress is unknown."""
    bar = ProgressBar()
    bar.start(what)
    bar.running()
    try:
        yield
    finally:
        bar.close()


@contextmanager
def reports_drawn() -> Iterator[None]:
    """Within the block, draw what this process reports, unless it is a rank, whose reports go to its parent."""
    if _sink is not None:
        yield
        return
    bar = ProgressBar()
    send_reports_to(bar.update)
    try:
        yield
    finally:
        send_reports_to(None)
        bar.close()


@contextmanager
def in_lines() -> Iterator[None]:
    """Within the block, log a bar that nobody is watching: a line every few seconds says how far the run has come."""
    global _in_lines
    before, _in_lines = _in_lines, True
    try:
        yield
    finally:
        _in_lines = before


class Waiting:
    """A line that counts seconds until the first report: first while ranks start, then while they have nothing to report."""

    def __init__(self, what: str, show: Callable[[str], None]) -> None:
        self.what, self.why, self.state = what, "", "starting"
        self._show, self._began_s = show, time.monotonic()
        self._over, self._lock = threading.Event(), threading.Lock()
        count = contextvars.copy_context().run  # a kernel keeps there to which cell an output belongs
        threading.Thread(target=count, args=(self._count,), name="seconds of a wait", daemon=True).start()

    def end(self) -> float:
        """Remove the line; return how long the wait was."""
        with self._lock:
            self._over.set()
        return time.monotonic() - self._began_s

    def _count(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_COUNTS):
            with self._lock:
                if not self._over.is_set():
                    self._show(self._text())

    def _text(self) -> str:
        why = f" ({self.why})" if self.why and self.state == "starting" else ""
        return f"{self.what}: {self.state}, {time.monotonic() - self._began_s:.0f} s{why}"


class ProgressBar:
    """One tqdm bar for all reports: in a notebook, a line that updates in place; in a terminal, the usual bar.

    If nobody is watching (a log file, CI), it draws nothing, or writes lines; see `in_lines`.
    """

    wants_all_ranks = False  # the ranks keep step with one another: one of them reports for all

    def __init__(self) -> None:
        tqdm.get_lock()  # made now: tqdm would fail where an interrupt comes while it makes it
        self._line = _NotebookLine() if is_notebook() else None
        self._title: str | None = None
        self._waiting: Waiting | None = None
        self._started_s = self._last_line_s = 0.0
        self._first_done = self._last_done = 0
        self._bar: Any = None  # of tqdm, where this is no notebook

    def start(self, what: str, why: str = "") -> None:
        """Show at once what is starting, and count the seconds; the first report replaces this line.

        `why` says why it may take long, and may be given later than `what`.
        """
        if self._title is None and self._waiting is None:
            if self._line is not None:
                self._line.show(f"{what}: starting")
                self._waiting = Waiting(what, self._line.show)
            else:
                self._bar = tqdm(desc=f"{what}: starting", bar_format="{desc}", disable=None, leave=False)
                if not self._bar.disable:
                    self._waiting = Waiting(what, self._bar.set_description_str)
        if self._waiting is not None:
            self._waiting.why = why or self._waiting.why

    def running(self) -> None:
        """Mark the end of the start-up phase."""
        if self._waiting is not None:
            self._waiting.state = "running"

    def update(self, done: int, total: int, title: str, details: str = "", *for_other_views: object) -> None:
        if title != self._title or done < self._last_done:  # the next one may have the same title
            self._begin(done, title)
        self._last_done = done
        if self._line is not None:
            elapsed_s = time.monotonic() - self._started_s
            self._line.show(bar_text(done, total, elapsed_s, title, details, self._first_done))
        elif _in_lines and not sys.stderr.isatty():
            self._write_line(done, total, title, details)
        else:
            if self._bar is None:
                settings = {"bar_format": BAR_FORMAT, "disable": None, "leave": False}
                self._bar = tqdm(total=total, initial=done, desc=title, **settings)
            self._bar.set_postfix_str(details, refresh=False)
            self._bar.update(done - self._bar.n)

    def print(self, text: str, stream) -> None:
        """Print a line without breaking the bar."""
        with tqdm.external_write_mode(file=stream):
            print(text, file=stream, flush=True)

    def close(self) -> None:
        """Remove the bar; in a notebook its last state stays, or the time taken by work without reports."""
        if self._line is not None and self._waiting is not None:
            seconds = self._waiting.end()
            self._line.show(f"{self._waiting.what}: ended after {seconds:.1f} s")
        self._end()

    def _begin(self, done: int, title: str) -> None:
        """Begin a new bar for each piece of work, below the last one; the first replaces the start-up line."""
        if self._line is not None and self._waiting is None:
            self._line = _NotebookLine()
        self._end()
        self._title, self._first_done = title, done
        self._started_s = self._last_line_s = time.monotonic()

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.end()
        if self._bar is not None:
            self._bar.close()
        self._bar = self._title = self._waiting = None

    def _write_line(self, done: int, total: int, title: str, details: str) -> None:
        if time.monotonic() - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = time.monotonic()
            print(f"{title}: {done} of {total}" + (f", {details}" if details else ""), file=sys.stderr, flush=True)


class _NotebookLine:
    """A line of text that's shown once and then updated in place; a saved notebook keeps the last version."""

    def __init__(self) -> None:
        self._handle = None

    def show(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def bar_text(done: int, total: int, elapsed_s: float, title: str, details: str = "", first_done: int = 0) -> str:
    """Return a bar as one line of text. The remaining time is estimated from the steps since the first report."""
    return tqdm.format_meter(
        done, total, elapsed_s, prefix=title, bar_format=BAR_FORMAT, postfix=details or None, initial=first_done
    )


def count_ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size:,} ranks"


def is_notebook() -> bool:
    """Return True in a kernel, whatever front end shows its output: JupyterLab, nbconvert, an editor."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
