"""Watch a run in a notebook: a line per rank, a loss curve and a memory chart, all redrawn during training.

The view updates text and a picture in place instead of using a widget, so a saved notebook keeps the view.
"""

import base64
import io
import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from fsdp_helpers.notebook import InPlace
from fsdp_helpers.progress import BAR_FORMAT, Report
from fsdp_helpers.quantities import MB, format_bytes, format_count
from fsdp_helpers.records import RunRecord
from fsdp_helpers.training.palette import BLUE, TEXT_COLOR, TEXT_STYLE

SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_CURVES = 0.25, 1.0  # a curve takes a tenth of a second to draw
SMOOTHED_OVER = 1 / 20  # the moving average's window, as a fraction of the steps so far
PIXELS_PER_INCH = 220  # twice the size shown, for high-density screens


class LiveView:
    """A live view of all ranks, which `launch` can use in place of a `ProgressBar`."""

    def __init__(self) -> None:
        self._lines, self._curve = InPlace(), InPlace()
        self._title, self._first_done = "", 0  # steps of the earlier run, if this one is resumed
        self._reports: dict[int, Report] = {}  # each rank's last report
        self._memory: dict[int, tuple[int, int]] = {}  # by rank: bytes held between steps, and the peak
        self._losses: dict[int, float] = {}  # rank 0's, by step
        self._started_s = self._lines_s = self._curve_s = 0.0

    def start(self, what: str) -> None:
        """Show what's starting; the first report replaces this line."""
        if not self._title:
            self._title = what
            self._lines.show(f"{what}: starting")

    def running(self) -> None:
        """Do nothing, because the first report is about to arrive."""

    def update(self, report: Report, rank: int = 0) -> None:
        """Show a rank's new report along with the latest report from every other rank."""
        now_s = time.monotonic()
        if not self._reports:
            self._title, self._started_s, self._first_done = report.title, now_s, report.done
        self._reports[rank] = report
        if report.memory is not None:
            self._memory[rank] = report.memory
        if rank == 0 and report.loss is not None:
            self._losses[report.done] = report.loss
        if now_s - self._lines_s > SECONDS_BETWEEN_LINES:
            self._lines_s = now_s
            self._show_lines()
        if len(self._losses) > 1 and now_s - self._curve_s > SECONDS_BETWEEN_CURVES:
            self._curve_s = now_s
            self._show_curve(self._losses, "of rank 0's images")

    def close(self) -> None:
        """Leave each rank's last report on screen."""
        if self._reports:
            self._show_lines()

    def summarize(self, record: RunRecord) -> None:
        """Summarize a finished run: the bytes held by each rank, and the global batch's loss in every step."""
        steps = format_count(len(record.step_losses), "step")
        text = [f"{self._title}: {steps}, test accuracy {record.epochs[-1].test_accuracy:.2%}"]
        for rank in record.ranks:
            if rank.peak_bytes is not None:
                self._memory[rank.rank] = (rank.held_bytes, rank.peak_bytes)
                text.append(
                    f"rank {rank.rank}: held {format_bytes(rank.held_bytes)}, peak {format_bytes(rank.peak_bytes)}"
                )
        self._lines.show("\n".join(text))
        if record.step_losses:
            self._show_curve(dict(enumerate(record.step_losses, record.first_step + 1)), "over the global batch")

    def _show_lines(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        settings = {"bar_format": BAR_FORMAT, "initial": self._first_done}
        bars = [
            tqdm.format_meter(
                one.done, one.total, elapsed_s, prefix=f"rank {rank}", postfix=one.details or None, **settings
            )
            for rank, one in sorted(self._reports.items())
        ]
        self._lines.show("\n".join([self._title, *bars]))

    def _show_curve(self, losses: Mapping[int, float], of_what: str) -> None:
        title, steps = curve_title(f"Loss {of_what}", [*losses.values()]), [*losses]
        alt = f"{title}; {self._title}, steps {steps[0]} to {steps[-1]}."
        if self._memory:
            held = [
                f"rank {rank} holds {format_bytes(sizes[0])} and peaks at {format_bytes(sizes[1])}"
                for rank, sizes in sorted(self._memory.items())
            ]
            alt += f" In memory, {'; '.join(held)}."
        picture, size = run_picture(steps, [*losses.values()], self._memory, title)
        self._curve.show({"image/png": picture, "text/plain": alt}, {"image/png": {"alt": alt, **size}})


def run_picture(
    steps: Sequence[int], losses: Sequence[float], memory: Mapping[int, tuple[int, int]], title: str
) -> tuple[str, dict[str, int]]:
    """Return a PNG in base64, and the width and height at which to show it.

    It shows the smoothed loss so far, drawn over a pale line of the loss in each step. Next to that, it shows the bytes
    that each rank holds between two steps (solid) and at the peak of a step (pale), once they're known.
    """
    with rc_context({**TEXT_STYLE, "axes.spines.top": False, "axes.spines.right": False}):
        fig = Figure(figsize=(8, 2.2), dpi=PIXELS_PER_INCH, layout="constrained")
        loss_ax, *memory_axes = fig.subplots(1, 2, width_ratios=(4, 1)) if memory else [fig.subplots()]
        draw_loss(loss_ax, steps, losses)
        loss_ax.set_title(title, loc="left", fontsize=10)
        for ax in memory_axes:
            draw_memory(ax, memory)
        file = io.BytesIO()
        fig.savefig(file, format="png")
    width, height = (int(inches * PIXELS_PER_INCH / 2) for inches in fig.get_size_inches())
    return base64.b64encode(file.getvalue()).decode(), {"width": width, "height": height}


def curve_title(subject: str, losses: Sequence[float]) -> str:
    """Return the curve's title, including the first and last values of the line."""
    smooth = smoothed(losses)
    how = ", smoothed" if smooth != losses else ""
    return f"{subject}{how}: from {smooth[0]:.3f} to {smooth[-1]:.3f}"


def draw_loss(ax, steps: Sequence[int], losses: Sequence[float]) -> None:
    """Draw the smoothed loss as a line, and each step's loss as a pale line behind it, up to the current step."""
    smooth = smoothed(losses)
    ax.plot(steps, losses, color=BLUE, linewidth=1, alpha=0.3)
    ax.plot(steps, smooth, color=BLUE, linewidth=1.5)
    ax.plot(steps[-1:], smooth[-1:], color=BLUE, marker="o", markersize=4)
    ax.annotate(f" {smooth[-1]:.3f}", (steps[-1], smooth[-1]), color=TEXT_COLOR, va="center")
    room = 0.08 * max(1, steps[-1] - steps[0])  # for the number at the end
    highest = max(filter(math.isfinite, losses), default=1.0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # there's no step 1.5
    ax.set(xlim=(steps[0], steps[-1] + room), ylim=(0, 1.1 * highest), xlabel="step", ylabel="loss (nats)")


def draw_memory(ax, memory: Mapping[int, tuple[int, int]]) -> None:
    """Draw a bar for each rank: held bytes (solid) and the peak (pale)."""
    ranks = sorted(memory)
    ax.barh(ranks, [memory[rank][1] / MB for rank in ranks], color=BLUE, alpha=0.3)
    ax.barh(ranks, [memory[rank][0] / MB for rank in ranks], color=BLUE)
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    ax.invert_yaxis()
    ax.set(xlabel="held, peak (MB)")


def smoothed(losses: Sequence[float]) -> Sequence[float]:
    """Return a moving average of the losses: for each step, the mean of its loss and the losses just before it."""
    window = max(1, round(len(losses) * SMOOTHED_OVER))
    if window == 1:
        return losses  # the exact values: differences of sums would be rounded
    sums = [0.0, *accumulate(losses)]
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(losses) + 1)]
