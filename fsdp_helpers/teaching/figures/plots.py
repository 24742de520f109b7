"""One function per figure; each of them draws records and returns `fig, ax`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fsdp_helpers.measuring.cell_trace import compared
from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, OffloadCopy
from fsdp_helpers.measuring.step_profile import predicted_peaks
from fsdp_helpers.planning.walk.ledger import Peak
from fsdp_helpers.quantities import MB, in_mb
from fsdp_helpers.records import LeverResult, RunRecord, StepTrace
from fsdp_helpers.teaching.figures.bars import draw_held_in_peak, draw_rank, draw_times, keys, rows_of
from fsdp_helpers.teaching.figures.descriptions import put_in_words
from fsdp_helpers.teaching.figures.style import MARKERS, PEAK_COLOR, STRATEGY_COLORS, figure_style
from fsdp_helpers.teaching.figures.timelines import draw_collectives, draw_copies, draw_memory, unit_copies
from fsdp_helpers.teaching.figures.titles import (
    copies_of_a_step,
    foot_of_the_ladder,
    lowest_by_ranks,
    lowest_peak,
    peak_of_curve,
    sent_in_a_step,
    titled,
)
from fsdp_helpers.training.palette import TEXT_COLOR

NO_OVERLAP = "order and waiting (faint), not speed or overlap: each collective is waited for"
HELD_IN_PEAK = "held (solid) and peak (light) on a rank (MB)"


def plot_distances(runs: Mapping[str, Sequence[float]], first: int) -> tuple[Figure, Axes]:
    """Plot how far each run's loss is from the uninterrupted run's, one line per run; `first` is the first step."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
        for (name, distances), marker in zip(runs.items(), cycle(MARKERS), strict=False):
            ax.plot(range(first, first + len(distances)), distances, marker=marker, label=name)
        ax.set(xlabel="step", ylabel="distance from the\nuninterrupted loss (nats)", ylim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend()
    return fig, ax


def plot_digits(images: Tensor, labels: Tensor, predictions: Tensor | None = None) -> tuple[Figure, Axes]:
    """Plot a row of digits (N, 1, 28, 28), each titled with its label or prediction: "7 ≠ 1" is a wrong prediction."""
    right = labels[: len(images)].tolist()
    shown = right if predictions is None else predictions[: len(images)].tolist()
    with figure_style():
        size = (0.75 * len(images), 1.1)
        fig, axes = plt.subplots(1, len(images), figsize=size, layout="constrained", squeeze=False)
        for ax, image, label, digit in zip(axes[0], images, right, shown, strict=True):
            ax.imshow(image[0].cpu().numpy(), cmap="gray_r")
            ax.axis("off")
            wrong = {} if digit == label else {"color": PEAK_COLOR, "weight": "bold"}
            ax.set_title(f"{digit} ≠ {label}" if wrong else digit, loc="center", **wrong)
    return fig, axes[0]


def plot_trace(
    traces: Mapping[int, StepTrace] | Sequence[StepTrace], subject: str = ""
) -> tuple[Figure, Sequence[Axes]]:
    """Plot what ranks did on one timeline: their collectives, if there are any, above the bytes that they allocated.

    `traces` has a trace per rank, by number or in order.
    """
    traces = compared(traces if isinstance(traces, Mapping) else dict(enumerate(traces)))
    first = next(iter(traces.values())).curve
    has_collectives = any(trace.collectives for trace in traces.values())
    heights = [*([0.7 + 0.3 * len(traces)] if has_collectives else []), 1.4]  # a slide has room for two ranks
    with figure_style():
        look = {"figsize": (8, 1 + sum(heights)), "height_ratios": heights, "layout": "constrained"}
        fig, grid = plt.subplots(len(heights), 1, sharex=True, squeeze=False, **look)
        *above, memory_ax = axes = grid[:, 0]
        draw_memory(memory_ax, traces)
        memory_ax.set(title=peak_of_curve(first) if above else titled(peak_of_curve(first), subject))
        for ax in above:
            draw_collectives(ax, traces)
            ax.set(title=titled(sent_in_a_step(traces), subject))
            memory_ax.set(xlabel=f"time (ms); {NO_OVERLAP}")
    return fig, axes


def plot_held_and_peak(runs: Mapping[str, RunRecord], peaks: Mapping[str, Peak] | None = None) -> tuple[Figure, Axes]:
    """Plot two bars per row: a rank's bytes between steps, and its bytes at the peak according to the ledger.

    `peaks` are the predicted peaks, keyed like `runs`; without them, `predicted_peaks` measures a step of each run
    here. A line marks the measured peak. Ranks with the same bytes share a row.
    """
    peaks = predicted_peaks(runs) if peaks is None else peaks
    rows = rows_of({name: run.ranks for name, run in runs.items()})
    highest_bytes = max(max(record.peak_bytes, peaks[name].bytes) for name, record in rows.values())
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 1.3 + 0.62 * len(rows)), layout="constrained")
        kinds: set[str] = set()
        for place, (name, record) in enumerate(rows.values()):
            alone = len(runs[name].ranks) == 1
            kinds |= draw_rank(ax, place, record, peaks[name], highest_bytes, alone)
        ax.set_yticks(range(len(rows)), rows)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        fullest = {name: max(run.ranks, key=lambda rank: rank.peak_bytes) for name, run in runs.items()}
        ax.set(xlabel="bytes on one rank (MB)", xlim=(0, 1.17 * highest_bytes / MB), title=lowest_peak(fullest))
        look = {"handlelength": 1.2, "columnspacing": 1.2, "loc": "outside lower left"}
        fig.legend(handles=keys(kinds), ncols=4, **look)
    return fig, ax


def plot_peak_by_ranks(
    peaks: Mapping[str, Mapping[int, int]], num_params: int, strategies: Mapping[str, str]
) -> tuple[Figure, Axes]:
    """Draw peak bytes per parameter against the number of ranks.

    There's one line per name, which is written at its end, in the color of its strategy in `strategies`.
    """
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
        used, ends = set(), []
        for place, (name, by_ranks) in enumerate(peaks.items()):
            sizes = [size / num_params for size in by_ranks.values()]
            style = "--" if strategies[name] in used else "-"
            used.add(strategies[name])
            look = {"marker": MARKERS[place % len(MARKERS)], "color": STRATEGY_COLORS[strategies[name]]}
            ax.plot(list(by_ranks), sizes, style, label=name, **look)
            ends.append((max(by_ranks), sizes[-1], name))
        last = max(x for x, _, _ in ends)
        for x, y, name in apart(ends):
            here = (
                {"va": "center"} if x == last else {"ha": "center", "va": "top"}
            )  # otherwise, below the line's last marker
            ax.text(x, y, f"  {name}" if x == last else f"\n{name}", linespacing=0.7, **here)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 4, 5, 10)))
        ax.set_xticks(sorted({ranks for by_ranks in peaks.values() for ranks in by_ranks}))
        highest = max(size for by_ranks in peaks.values() for size in by_ranks.values()) / num_params
        ax.set(xlabel="ranks, each with the same number of images", ylabel="peak on a rank\n(bytes per parameter)")
        ax.set(xlim=(1 - 0.12 * last, None), ylim=(0, 1.1 * highest), title=lowest_by_ranks(peaks, num_params))
    return fig, ax


def apart(ends: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Yield named points (x, y, name), moved up where names in the same column would overlap."""
    line = 0.07 * max(y for _, y, _ in ends)  # the height of a line of text
    below = (0.0, -line)
    for x, y, name in sorted(ends):
        below = (x, max(y, below[1] + line) if x == below[0] else y)
        yield *below, name


def plot_ladder(rungs: Sequence[LeverResult]) -> tuple[Figure, Sequence[Axes]]:
    """Plot each rung's held bytes (solid), peak (light), predicted peak (a mark), change in peak, and step time."""
    with figure_style():
        size = (8, 0.8 + 0.4 * len(rungs))
        fig, (memory_ax, time_ax) = plt.subplots(1, 2, figsize=size, layout="constrained", width_ratios=(3, 1))
        peaks = [rung.peak_bytes for rung in rungs]
        draw_held_in_peak(memory_ax, rungs)
        for place, rung in enumerate(rungs):
            predicted = rung.predicted_bytes / MB
            look = {"color": TEXT_COLOR, "linewidth": 2, "label": "predicted"}
            memory_ax.plot([predicted] * 2, [place - 0.42, place + 0.42], **look)
            change = f" ({(peaks[place] - peaks[place - 1]) / MB:+,.1f})" if place else ""
            right = max(peaks[place] / MB, predicted)
            memory_ax.text(right, place, f"  {in_mb(peaks[place])}{change}", va="center", color=TEXT_COLOR)
        draw_times(time_ax, rungs)
        memory_ax.set_yticks(range(len(rungs)), [rung.name for rung in rungs])
        memory_ax.set(title=foot_of_the_ladder(rungs), xlabel=HELD_IN_PEAK, xlim=(0, 1.25 * max(peaks) / MB))
        memory_ax.legend(handles=memory_ax.lines[:1], loc="lower right")
    return fig, (memory_ax, time_ax)


def plot_copies(trace: StepTrace, copies: Sequence[OffloadCopy], units: Sequence[str]) -> tuple[Figure, Axes]:
    """Plot one step with offload on a timeline: collectives, and copies between host and device, unit by unit."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
        draw_copies(ax, trace, copies, units)
        found = unit_copies(copies, units)
        finding = copies_of_a_step([way for _, way, _ in found])
        ax.set(title=finding)
    orders = [
        ", ".join(unit.removeprefix("blocks.") for unit, one, _ in found if one == way) for way in (TO_DEVICE, TO_HOST)
    ]
    put_in_words(fig, f"{finding}. In this order to the device: {orders[0]}; to the host: {orders[1]}.")
    return fig, ax
