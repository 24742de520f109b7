"""Watching a run in a notebook: a line per rank, the loss as a curve, and memory, redrawn while it trains.

It updates text and a picture in place instead of using a widget, so a saved notebook keeps the last state.
"""

import base64
import io
import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from fsdp_helpers.quantities import MB, format_bytes
from fsdp_helpers.ranks.progress import Waiting, bar_text
from fsdp_helpers.records import RunRecord
from fsdp_helpers.training.palette import BLUE, TEXT_COLOR, TEXT_STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_CURVES = 0.25, 1.0  # a curve takes a tenth of a second to draw
SMOOTHED_OVER = 1 / 20  # of the losses so far
PIXELS_PER_INCH = 220  # twice what is shown, for screens of double density


class LiveView:
    """A view that replaces the `ProgressBar` of `launch`: every rank reports, and all are shown."""

    wants_all_ranks = True

    def __init__(self) -> None:
        self._lines, self._curve = _InPlace(), _InPlace()
        self._title, self._first_done = "", 0  # steps of an earlier run, where this one is resumed
        self._waiting: Waiting | None = None
        self._reports: dict[int, tuple[int, int, str]] = {}  # by rank: steps done, steps in all, what else it says
        self._memory: dict[int, tuple[int, int]] = {}  # by rank: bytes held between steps, and the peak
        self._steps: list[int] = []
        self._losses: list[float] = []
        self._started_s = self._lines_s = self._curve_s = 0.0

    def start(self, what: str, why: str = "") -> None:
        if not self._title:
            self._title = what
            self._lines.show({"text/plain": f"{what}: starting"})
            self._waiting = Waiting(what, lambda text: self._lines.show({"text/plain": text}))
        if self._waiting is not None:
            self._waiting.why = why or self._waiting.why

    def running(self) -> None:
        if self._waiting is not None:
            self._waiting.state = "running"

    def update(
        self,
        rank: int,
        done: int,
        total: int,
        title: str,
        details: str = "",
        loss: float | None = None,
        memory: tuple[int, int] | None = None,
    ) -> None:
        now_s = time.monotonic()
        if not self._reports:
            self._end_waiting()
            self._title, self._started_s, self._first_done = title, now_s, done
        self._reports[rank] = (done, total, details)
        if memory is not None:
            self._memory[rank] = memory
        if rank == 0 and loss is not None:
            self._steps.append(done)
            self._losses.append(loss)
        if now_s - self._lines_s > SECONDS_BETWEEN_LINES:
            self._lines_s = now_s
            self._show_lines()
        if len(self._losses) > 1 and now_s - self._curve_s > SECONDS_BETWEEN_CURVES:
            self._curve_s = now_s
            self._show_curve(self._steps, self._losses, "of rank 0's images")

    def print(self, text: str, stream) -> None:
        print(text, file=stream, flush=True)

    def close(self) -> None:
        """Leave each rank's last report on screen."""
        self._end_waiting()
        if self._reports:
            self._show_lines()

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.end()
            self._waiting = None

    def summarize(self, record: RunRecord) -> None:
        """Summarize a finished run: each rank's held bytes, and the loss of every step over the global batch."""
        last = record.epochs[-1]
        text = [f"{self._title}: {len(record.step_losses)} steps, test accuracy {last.test_accuracy:.2%}"]
        for rank in record.ranks:
            if rank.peak_bytes is not None:
                self._memory[rank.rank] = (rank.held_bytes, rank.peak_bytes)
                text.append(
                    f"rank {rank.rank}: held {format_bytes(rank.held_bytes)}, peak {format_bytes(rank.peak_bytes)}"
                )
        self._lines.show({"text/plain": "\n".join(text)})
        if record.step_losses:
            steps = range(record.first_step + 1, record.first_step + len(record.step_losses) + 1)
            self._show_curve(steps, record.step_losses, "over the global batch")

    def _show_lines(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        bars = [
            bar_text(done, total, elapsed_s, f"rank {rank}", details, self._first_done)
            for rank, (done, total, details) in sorted(self._reports.items())
        ]
        self._lines.show({"text/plain": "\n".join([self._title, *bars])})

    def _show_curve(self, steps: Sequence[int], losses: Sequence[float], of_what: str) -> None:
        title = curve_title(f"Loss {of_what}", losses)
        alt = f"{title}; {self._title}, steps {steps[0]} to {steps[-1]}."
        if self._memory:
            held = [
                f"rank {rank} holds {format_bytes(sizes[0])} and peaks at {format_bytes(sizes[1])}"
                for rank, sizes in sorted(self._memory.items())
            ]
            alt += f" In memory, {'; '.join(held)}."
        picture, size = run_picture(steps, losses, self._memory, title)
        self._curve.show({"image/png": picture, "text/plain": alt}, {"image/png": {"alt": alt, **size}})


def run_picture(
    steps: Sequence[int], losses: Sequence[float], memory: Mapping[int, tuple[int, int]], title: str
) -> tuple[str, dict[str, int]]:
    """Return a PNG in base64, and the width and height to show it at.

    It shows the smoothed loss so far over a pale line of each step's loss and, once known, the bytes each rank holds
    between two steps (solid) and at the peak (pale).
    """
    from matplotlib import rc_context  # takes half a second, which other runs need not wait
    from matplotlib.figure import Figure

    with rc_context(TEXT_STYLE):
        fig = Figure(figsize=(8, 2.2), dpi=PIXELS_PER_INCH, layout="constrained")
        if memory:
            loss_ax, memory_ax = fig.subplots(1, 2, width_ratios=(4, 1))
            draw_memory(memory_ax, memory)
        else:
            loss_ax = fig.subplots()
        draw_loss(loss_ax, steps, losses)
        loss_ax.set_title(title, loc="left", fontsize=10)
        file = io.BytesIO()
        fig.savefig(file, format="png")
    width, height = (int(inches * PIXELS_PER_INCH / 2) for inches in fig.get_size_inches())
    return base64.b64encode(file.getvalue()).decode(), {"width": width, "height": height}


def curve_title(subject: str, losses: Sequence[float]) -> str:
    """Return the curve's title, with the values at both ends of the line."""
    smooth = smoothed(losses)
    how = ", smoothed" if smooth != list(losses) else ""
    return f"{subject}{how}: from {smooth[0]:.3f} to {smooth[-1]:.3f}"


def draw_loss(ax: "Axes", steps: Sequence[int], losses: Sequence[float]) -> None:
    """Draw the smoothed loss over the pale loss of each step; the axis ends at the current step."""
    from matplotlib.ticker import MaxNLocator

    smooth = smoothed(losses)
    ax.plot(steps, losses, color=BLUE, linewidth=1, alpha=0.3)
    ax.plot(steps, smooth, color=BLUE, linewidth=1.5)
    ax.plot(steps[-1:], smooth[-1:], color=BLUE, marker="o", markersize=4)
    ax.annotate(f" {smooth[-1]:.3f}", (steps[-1], smooth[-1]), color=TEXT_COLOR, va="center")
    ax.spines[["top", "right"]].set_visible(False)
    room = 0.08 * max(1, steps[-1] - steps[0])  # for the number at the end
    highest = max(filter(math.isfinite, losses), default=1.0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 1.5
    ax.set(xlim=(steps[0], steps[-1] + room), ylim=(0, 1.1 * highest), xlabel="step", ylabel="loss (nats)")


def draw_memory(ax: "Axes", memory: Mapping[int, tuple[int, int]]) -> None:
    """Draw a bar for each rank: held bytes (solid) and the peak (pale)."""
    ranks = sorted(memory)
    ax.barh(ranks, [memory[rank][1] / MB for rank in ranks], color=BLUE, alpha=0.3)
    ax.barh(ranks, [memory[rank][0] / MB for rank in ranks], color=BLUE)
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xlabel="held, peak (MB)")


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return, for each step, the mean of its loss and the preceding losses."""
    window = max(1, round(len(losses) * SMOOTHED_OVER))
    if window == 1:
        return list(losses)  # differences of sums are rounded
    sums = [0.0, *accumulate(losses)]
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(losses) + 1)]


class _InPlace:
    """An output that is shown once and then updated in place."""

    def __init__(self) -> None:
        self._handle = None

    def show(self, data: dict[str, str], metadata: dict | None = None) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)
