"""One function per figure: each takes records, draws, and returns `fig, ax`."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fsdp_helpers.measuring.copies import OffloadCopy
from fsdp_helpers.quantities import MB
from fsdp_helpers.records import (
    ComparisonRow,
    MemoryCurve,
    RankRecord,
    Rung,
    StepTrace,
)
from fsdp_helpers.teaching.figures.style import (
    LINE_PATTERNS,
    MARKERS,
    PEAK_COLOUR,
    STATE_COLOURS,
    STRATEGY_COLOURS,
    TEXT_COLOUR,
    figure_style,
)
from fsdp_helpers.teaching.figures.timelines import draw_collectives, draw_copies, draw_memory_curve, draw_notes

SAME = 1e-4  # nats; what other orders of the same fp32 sums leave is far less


def plot_step_losses(runs: Mapping[str, Sequence[float]]) -> tuple[Figure, Axes]:
    """Training loss of each step, one line per run. Where runs coincide, thin broken lines lie on thick pale ones."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
        for depth, ((name, losses), pattern) in enumerate(zip(runs.items(), cycle(LINE_PATTERNS), strict=False)):
            above = len(runs) - 1 - depth
            look = {"linewidth": 1.5 + 2 * above, "linestyle": pattern, "alpha": 0.4 if depth == 0 and above else 1}
            ax.plot(range(1, len(losses) + 1), losses, label=name, **look)
        ax.set(xlabel="step", ylabel="loss over the global batch (nats)", title=_how_equal(list(runs.values())))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
        ax.legend(handlelength=5)
    return fig, ax


def _how_equal(runs: Sequence[Sequence[float]]) -> str:
    """Return what a figure of losses shows, if it is that they are the same."""
    if len(runs) < 2 or len({len(losses) for losses in runs}) > 1:
        return ""
    gap = max(max(losses) - min(losses) for losses in zip(*runs, strict=True))
    return f"Same losses: at most {gap:.0e} apart" if gap < SAME else ""


def plot_digits(images: Tensor, labels: Tensor, predictions: Tensor | None = None) -> tuple[Figure, Axes]:
    """A row of digits, images (N, 1, 28, 28), titled with the label, or the prediction: "7 ≠ 1" is a wrong one."""
    with figure_style():
        size = (0.75 * len(images), 1.1)
        fig, axes = plt.subplots(1, len(images), figsize=size, layout="constrained", squeeze=False)
        for index, ax in enumerate(axes[0]):
            ax.imshow(images[index, 0].cpu().numpy(), cmap="gray_r")
            ax.axis("off")
            right, shown = int(labels[index]), int((labels if predictions is None else predictions)[index])
            wrong = {} if shown == right else {"color": PEAK_COLOUR, "weight": "bold"}
            ax.set_title(f"{shown} ≠ {right}" if wrong else shown, loc="center", **wrong)
    return fig, axes[0]


def plot_memory_curve(curve: MemoryCurve, title: str, notes: Mapping[str, float] | None = None) -> tuple[Figure, Axes]:
    """Bytes allocated over one step, with its phases shaded and its peak marked.

    `notes` are texts and the seconds that they speak of; each gets a line down to the curve at its moment.
    """
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 3.4 if notes else 2.8), layout="constrained")
        draw_memory_curve(ax, curve)
        draw_notes(ax, curve, notes or {})
        ax.set(title=title)
    return fig, ax


def moments_of_one_unit(trace: StepTrace) -> dict[str, float]:
    """Notes for the memory curve of a model in a single FSDP unit: what each of its jumps is, and when it comes."""
    gather = next(seen for seen in trace.collectives if seen.op == "all_gather")
    reduce = next(seen for seen in trace.collectives if seen.op == "reduce_scatter")
    forward = next(phase for phase in trace.curve.phases if phase.name == "forward")
    return {
        "all-gather: parameters are whole": gather.end_s,
        "forward has kept its activations": forward.end_s,
        "backward has made whole gradients": reduce.start_s,
        "reduce-scatter: their slices of the mean": reduce.end_s,
    }


def plot_held_and_peak(ranks: Mapping[str, RankRecord]) -> tuple[Figure, Axes]:
    """One bar per rank: what it keeps (stacked), what else it holds between steps, and a line at its peak."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 0.8 + 0.45 * len(ranks)), layout="constrained")
        for row, record in enumerate(ranks.values()):
            parts = [record.parameter_bytes, record.gradient_bytes, record.optimizer_bytes]
            parts.append(max(0, record.held_bytes - sum(parts)))
            left = 0
            for size, colour in zip(parts, STATE_COLOURS.values(), strict=True):
                ax.barh(row, size / MB, left=left / MB, color=colour, height=0.65)
                left += size
            ax.plot([record.peak_bytes / MB] * 2, [row - 0.4, row + 0.4], color=PEAK_COLOUR, linewidth=2)
            ax.text(
                record.peak_bytes / MB, row, f"  peak {record.peak_bytes / MB:,.1f}", va="center", color=PEAK_COLOUR
            )
        ax.set_yticks(range(len(ranks)), ranks.keys())
        ax.invert_yaxis()
        highest = max(record.peak_bytes for record in ranks.values()) / MB
        ax.set(xlabel="bytes on one rank (MB)", xlim=(0, 1.2 * highest))
        handles = [Patch(color=colour, label=name) for name, colour in STATE_COLOURS.items()]
        ax.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return fig, ax


def plot_collectives(traces: Sequence[StepTrace], title: str) -> tuple[Figure, Axes]:
    """The collectives of one step on a time line, one row per rank, each with the MB that the rank sends."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 1.1 + 0.5 * len(traces)), layout="constrained")
        draw_collectives(ax, traces)
        ax.set(title=title, xlabel="time in the step (ms); numbers are the MB that the rank sends")
    return fig, ax


def plot_step(traces: Sequence[StepTrace], title: str) -> tuple[Figure, Sequence[Axes]]:
    """One step on one time line: the collectives of every rank, and below them the bytes allocated on rank 0."""
    with figure_style():
        size, heights = (8, 3.6 + 0.5 * len(traces)), (0.4 + 0.5 * len(traces), 2.4)
        fig, axes = plt.subplots(2, 1, figsize=size, sharex=True, height_ratios=heights, layout="constrained")
        draw_memory_curve(axes[1], traces[0].curve)
        draw_collectives(axes[0], traces)
        axes[0].set(title=f"{title}; numbers are the MB that a rank sends")
        axes[1].set(ylabel="on rank 0 (MB)")
    return fig, axes


def plot_peak_by_ranks(peaks: Mapping[str, Mapping[int, int]], num_params: int) -> tuple[Figure, Axes]:
    """Draw peak bytes per parameter against the number of ranks.

    There is one line per name: a strategy, or one with a variant ("ddp, lean").
    """
    with figure_style():
        fig, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
        strategies = [name.partition(",")[0] for name in peaks]
        for place, (name, by_ranks) in enumerate(peaks.items()):
            sizes = [size / num_params for size in by_ranks.values()]
            style = "--" if strategies[place] in strategies[:place] else "-"
            look = {"marker": MARKERS[place % len(MARKERS)], "color": STRATEGY_COLOURS[strategies[place]]}
            ax.plot(list(by_ranks), sizes, style, label=name, **look)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        highest = max(size for by_ranks in peaks.values() for size in by_ranks.values()) / num_params
        ax.set(xlabel="ranks, each with the same number of images", ylabel="peak on a rank (bytes per parameter)")
        ax.set_ylim(0, 1.1 * highest)
        ax.legend()
    return fig, ax


def plot_ladder(rungs: Sequence[Rung]) -> tuple[Figure, Sequence[Axes]]:
    """One bar per rung: bytes held (solid), peak (light), its prediction (a mark) and its change; and the step time."""
    with figure_style():
        size = (9, 0.8 + 0.4 * len(rungs))
        fig, (memory_ax, time_ax) = plt.subplots(1, 2, figsize=size, layout="constrained", width_ratios=(3, 1))
        places = range(len(rungs))
        colours = [STRATEGY_COLOURS[rung.strategy] for rung in rungs]
        peaks = [rung.peak_bytes / MB for rung in rungs]
        memory_ax.barh(places, peaks, color=colours, alpha=0.35, height=0.65)
        memory_ax.barh(places, [rung.held_bytes / MB for rung in rungs], color=colours, height=0.65)
        for place, rung in enumerate(rungs):
            predicted = rung.predicted_bytes / MB
            label = "predicted" if place == 0 else None
            memory_ax.plot([predicted] * 2, [place - 0.42, place + 0.42], color=TEXT_COLOUR, linewidth=2, label=label)
            change = f" ({peaks[place] - peaks[place - 1]:+,.1f})" if place else ""
            right = max(peaks[place], predicted)
            memory_ax.text(right, place, f"  {peaks[place]:,.1f}{change}", va="center", color="#4b5563")
        time_ax.barh(places, [1e3 * rung.step_s for rung in rungs], color=colours, height=0.65)
        memory_ax.set_yticks(places, [rung.name for rung in rungs])
        time_ax.set_yticks([])
        for ax in (memory_ax, time_ax):
            ax.invert_yaxis()
        memory_ax.set(
            title="held (solid) and peak (light), with the change of the peak",
            xlabel="bytes on a rank (MB)",
            xlim=(0, 1.25 * max(peaks)),
        )
        memory_ax.legend(loc="lower right")
        time_ax.set(title="step time, median", xlabel="time (ms)")
    return fig, (memory_ax, time_ax)


def plot_comparison(rows: Sequence[ComparisonRow]) -> tuple[Figure, Sequence[Axes]]:
    """For each model: bytes held (solid) and peak (light) of every strategy, and its step time."""
    models = list(dict.fromkeys(row.model for row in rows))
    with figure_style():
        fig, axes = plt.subplots(len(models), 2, figsize=(9, 0.6 + 2.2 * len(models)), layout="constrained")
        for (memory_ax, time_ax), model in zip(axes.reshape(-1, 2), models, strict=True):
            chosen = [row for row in rows if row.model == model]
            colours = [STRATEGY_COLOURS[row.strategy] for row in chosen]
            places = range(len(chosen))
            memory_ax.barh(places, [row.peak_bytes / MB for row in chosen], color=colours, alpha=0.35)
            memory_ax.barh(places, [row.held_bytes / MB for row in chosen], color=colours)
            time_ax.barh(places, [1e3 * row.step_s for row in chosen], color=colours)
            memory_ax.set_yticks(places, [row.label for row in chosen])
            time_ax.set_yticks([])
            for ax in (memory_ax, time_ax):
                ax.invert_yaxis()
            memory_ax.set(title=f"{model}: held (solid) and peak (light)", xlabel="bytes on a rank (MB)")
            time_ax.set(title="step time, median", xlabel="time (ms)")
    return fig, axes


def plot_copies(trace: StepTrace, copies: Sequence[OffloadCopy], units: Sequence[str]) -> tuple[Figure, Axes]:
    """One step with offload on a time line: collectives, and the copies between host and device, unit by unit."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
        draw_copies(ax, trace, copies, units)
        ax.set(title="one step with offload, rank 0")
    return fig, ax
