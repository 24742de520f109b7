"""One progress bar, however many ranks: workers report, one process draws.

A worker calls `report(...)`. Where its reports go is set by whoever started it: the launcher sends them to
the parent process, torchrun's first rank draws them itself, and without either they are dropped.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

SECONDS_BETWEEN_REPORTS = 0.1
SECONDS_BETWEEN_LINES = 5.0
BAR_WIDTH = 100

_sink: Callable[..., None] | None = None
_last_report_s = 0.0
_in_lines = False


def send_reports_to(sink: Callable[..., None] | None) -> None:
    """From now on, `report(done, total, title, details)` calls `sink` with the same arguments."""
    global _sink
    _sink = sink


def wants_report(done: int, total: int) -> bool:
    """True if a report now would be drawn: ask before computing costly details."""
    return _sink is not None and (done == total or time.monotonic() - _last_report_s > SECONDS_BETWEEN_REPORTS)


def report(done: int, total: int, title: str, details: str = "") -> None:
    """Say that `done` of `total` steps are behind us; at most ten times a second gets through."""
    global _last_report_s
    if wants_report(done, total):
        _last_report_s = time.monotonic()
        _sink(done, total, title, details)


@contextmanager
def in_lines() -> Iterator[None]:
    """Within the block, a bar that nobody watches is a log: a line every few seconds says how far the run has come."""
    global _in_lines
    before, _in_lines = _in_lines, True
    try:
        yield
    finally:
        _in_lines = before


class ProgressBar:
    """Draws reports as one tqdm bar: in a notebook as one line that updates in place, in a terminal as usual.

    Where nobody watches (a log file, CI) it draws nothing, or writes lines, see `in_lines`.
    """

    def __init__(self) -> None:
        tqdm.get_lock()  # made now: tqdm would fail where an interrupt comes while it makes it
        self._in_notebook = _is_notebook()
        self._title = None
        self._started_s = self._last_line_s = 0.0
        self._bar = None  # a tqdm bar or, in a notebook, a display handle

    def update(self, done: int, total: int, title: str, details: str = "") -> None:
        if title != self._title:
            self.close()
            self._title = title
            self._started_s = self._last_line_s = time.monotonic()
        if self._in_notebook:
            self._draw_in_notebook(done, total, title, details)
        elif _in_lines and not sys.stderr.isatty():
            self._write_line(done, total, title, details)
        else:
            if self._bar is None:
                self._bar = tqdm(total=total, desc=title, unit="step", disable=None, leave=False)
            self._bar.set_postfix_str(details, refresh=False)
            self._bar.update(done - self._bar.n)

    def print(self, text: str, stream) -> None:
        """Print a line without cutting through the bar."""
        with tqdm.external_write_mode(file=stream):
            print(text, file=stream, flush=True)

    def close(self) -> None:
        if self._bar is not None and not self._in_notebook:
            self._bar.close()
        self._bar = None

    def _write_line(self, done: int, total: int, title: str, details: str) -> None:
        if time.monotonic() - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = time.monotonic()
            print(f"{title}: {done} of {total}" + (f", {details}" if details else ""), file=sys.stderr, flush=True)

    def _draw_in_notebook(self, done: int, total: int, title: str, details: str) -> None:
        from IPython.display import display

        elapsed = time.monotonic() - self._started_s
        line = tqdm.format_meter(
            done, total, elapsed, ncols=BAR_WIDTH, prefix=title, unit="step", postfix=details or None
        )
        if self._bar is None:
            self._bar = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._bar.update({"text/plain": line}, raw=True)


def _is_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
