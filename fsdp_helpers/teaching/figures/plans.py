"""Figures about plans: memory per rank by number of ranks, the fewest ranks that fit, and prediction errors."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fsdp_helpers.measuring.prediction_errors import ErrorRow
from fsdp_helpers.planning.plan import CATEGORIES, Plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.style import MARKERS, PEAK_COLORS, SERIES_COLORS, figure_style
from fsdp_helpers.teaching.figures.titles import errors_within, fits_from, titled
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

NEAR = 0.01  # relative to the measured peak
MODEL_SHIFT = 0.2  # between the marks of two models
NOT_CHOSEN = 0.3  # opacity of a bar for another number of ranks


def plot_waterfall(
    plans: Sequence[Plan], subject: str, *, chosen: int | None = None, highest_gb: float | None = None
) -> tuple[Figure, Axes]:
    """Plot one bar per number of ranks, stacked by category, with the allowance and the device's memory.

    If `chosen` is given, the other bars are pale. The axis ends at `highest_gb`, if it's given; a higher bar gets an
    arrow next to its number.
    """
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
        draw_waterfall(ax, plans, highest_gb)
        for bars in ax.containers if chosen else ():
            for plan, bar in zip(plans, bars, strict=True):
                bar.set_alpha(1.0 if plan.cluster.world_size == chosen else NOT_CHOSEN)
        needed = {plan.cluster.world_size: plan.needed_bytes for plan in plans}
        finding = fits_from(needed, plans[0].cluster.device_memory_bytes)
        ax.set(title=titled(finding, subject))
    return fig, ax


def draw_waterfall(ax: Axes, plans: Sequence[Plan], highest_gb: float | None = None) -> None:
    """Draw the bars for `plot_waterfall`."""
    places = range(len(plans))
    below = [0.0] * len(plans)
    for category in CATEGORIES.values():
        sizes = [plan.by_category()[category] / GB for plan in plans]
        look = {"color": PEAK_COLORS[category]}
        ax.bar(places, sizes, bottom=below, width=0.7, label=category, linewidth=0, **look)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    allowances = [plan.cluster.allowance_bytes / GB for plan in plans]
    ax.bar(places, allowances, bottom=below, width=0.7, label="allowance", color="none", edgecolor=FRAME_COLOR)
    memory = plans[0].cluster.device_memory_bytes / GB
    ax.axhline(memory, color="#b91c1c", linestyle="--", label=f"{memory:.0f} GB")
    highest_gb = highest_gb or 1.1 * max(memory, max(plan.needed_bytes for plan in plans) / GB)
    for place, plan in enumerate(plans):
        top = plan.needed_bytes / GB
        beyond = " ↑" if top > highest_gb else ""
        ax.text(place, min(top, highest_gb), f"{top:,.0f}{beyond}", ha="center", va="bottom", color=TEXT_COLOR)
    ax.set_xticks(places, [f"{plan.cluster.world_size:,}" for plan in plans])
    ax.set(xlabel="ranks, each with the same batch", ylabel="on one rank (GB)", ylim=(0, highest_gb))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def plot_what_fits(
    needed: Mapping[str, Mapping[int, float]], thresholds: Mapping[str, Mapping[int, int | None]]
) -> tuple[Figure, Axes]:
    """Plot a rank's bytes by number of ranks: a line per model, and a dashed line per device size.

    `needed` has the bytes by model and number of ranks; `thresholds` has the fewest ranks that fit, by model and device
    size in GB. A mark shows each threshold within the plotted range.
    """
    sizes = sorted({size for fewest in thresholds.values() for size in fewest})
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
        lines: list[Line2D] = []
        for (name, by_ranks), color, marker in zip(needed.items(), SERIES_COLORS[1:], MARKERS, strict=False):
            lines += ax.plot(list(by_ranks), [size / GB for size in by_ranks.values()], color=color, label=name)
            found = {size: ranks for size, ranks in thresholds[name].items() if ranks and ranks >= min(by_ranks)}
            ax.scatter(list(found.values()), list(found), color=color, marker=marker, zorder=3, label=f"{name} fits")
            for size, ranks in found.items():
                ax.annotate(f"{ranks:,}", (ranks, size), (3, 3), textcoords="offset points", color=TEXT_COLOR)
        for size in sizes:
            ax.axhline(size, color=FRAME_COLOR, linestyle="--", linewidth=0.8)
            ax.text(1.005, size, f"{size} GB", transform=ax.get_yaxis_transform(), va="center", color=TEXT_COLOR)
        ax.set(
            xscale="log", yscale="log", xlabel="ranks, each with the same batch", ylabel="memory needed per rank (GB)"
        )
        ticks = [ranks for ranks in next(iter(needed.values())) if ranks & (ranks - 1) == 0]
        ax.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks])
        ax.set_yticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set(title="A rank's needs fall until only units, activations and buffers are left")
        fig.legend(handles=lines, loc="outside lower left", ncols=len(lines))
    return fig, ax


def plot_errors(rows: Sequence[ErrorRow]) -> tuple[Figure, Axes]:
    """Plot prediction errors in percent: one mark per run, one column per variant, one marker shape per model."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 3.3), layout="constrained")
        for shift, (model, marker) in enumerate(zip(models, MARKERS, strict=False)):
            for real in (True, False):
                chosen = [row for row in rows if (row.model, row.real) == (model, real)]
                if not chosen:
                    continue
                beside = MODEL_SHIFT * (shift - (len(models) - 1) / 2)
                places = [variants.index(row.variant) + beside + (0.0 if real else 0.08) for row in chosen]
                color = SERIES_COLORS[1:][shift]
                look = {"facecolor": color if real else "none", "edgecolor": color, "marker": marker}
                label = f"{model}, {'real ranks' if real else 'one rank of N'}"
                ax.scatter(places, [100 * row.error for row in chosen], s=22, label=label, **look)
        ax.axhspan(-100 * NEAR, 100 * NEAR, color=FRAME_COLOR, alpha=0.2, zorder=0)
        ax.axhline(0, color=FRAME_COLOR, linewidth=0.8, zorder=0)
        ax.set_xticks(range(len(variants)), [variant.replace(" ", "\n") for variant in variants])
        finding = errors_within([row.error for row in rows], NEAR)
        ax.set(ylabel="predicted / measured - 1 (%)", title=f"{finding}; gray: {100 * NEAR:.0f}%")
        fig.legend(loc="outside lower left", ncols=3)
    return fig, ax
