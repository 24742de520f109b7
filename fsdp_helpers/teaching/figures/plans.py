"""Figures of plans: what a rank needs against the number of ranks, what fits where, how far predictions are off."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdp_helpers.measuring.errors import ErrorRow
from fsdp_helpers.planning.plan import CATEGORIES, Plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.descriptions import put_in_words
from fsdp_helpers.teaching.figures.findings import errors_within, fits_from, smallest_that_fits, titled
from fsdp_helpers.teaching.figures.plot_words import errors_in_words, fits_in_words, sentences, waterfall_in_words
from fsdp_helpers.teaching.figures.style import MARKERS, PEAK_COLORS, SERIES_COLORS, figure_style
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

NEAR = 0.01  # of the measured peak
MODEL_SHIFT = 0.2  # between the marks of two models
FITS, FITS_NOT = "#bbf7d0", "#fecaca"


def plot_waterfall(plans: Sequence[Plan], subject: str) -> tuple[Figure, Axes]:
    """Plot a bar per number of ranks, stacked by category, with what is outside the count and the device's memory."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
        draw_waterfall(ax, plans)
        needed = {plan.cluster.world_size: plan.needed_bytes for plan in plans}
        finding = fits_from(needed, plans[0].cluster.device_memory_bytes)
        ax.set(title=titled(finding, subject))
    put_in_words(fig, sentences(subject, finding, waterfall_in_words(plans)))
    return fig, ax


def draw_waterfall(ax: Axes, plans: Sequence[Plan]) -> None:
    """Draw the bars of `plot_waterfall`."""
    places = range(len(plans))
    below = [0.0] * len(plans)
    for category in CATEGORIES.values():
        sizes = [plan.by_category()[category] / GB for plan in plans]
        look = {"color": PEAK_COLORS[category]}
        ax.bar(places, sizes, bottom=below, width=0.7, label=category, linewidth=0, **look)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    outside = [plan.cluster.allowance_bytes / GB for plan in plans]
    ax.bar(places, outside, bottom=below, width=0.7, label="outside the count", color="none", edgecolor=FRAME_COLOR)
    memory = plans[0].cluster.device_memory_bytes / GB
    ax.axhline(memory, color="#b91c1c", linestyle="--", label=f"{memory:.0f} GB")
    for place, plan in enumerate(plans):
        top = plan.needed_bytes / GB
        ax.text(place, top, f"{top:,.0f}", ha="center", va="bottom", color=TEXT_COLOR)
    ax.set_xticks(places, [f"{plan.cluster.world_size:,}" for plan in plans])
    highest = max(memory, max(plan.needed_bytes for plan in plans) / GB)
    ax.set(xlabel="ranks, each with the same batch", ylabel="on one rank (GB)", ylim=(0, 1.1 * highest))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def plot_what_fits(plans: Mapping[str, Sequence[Sequence[Plan]]]) -> tuple[Figure, Sequence[Axes]]:
    """Plot a grid for each name, ranks across, device memory down: what a rank needs in GB, and whether it fits."""
    with figure_style():
        fig, axes = plt.subplots(1, len(plans), figsize=(9, 2.4), layout="constrained", sharey=True, squeeze=False)
        for ax, (name, rows) in zip(axes[0], plans.items(), strict=True):
            for down, row in enumerate(rows):
                for across, plan in enumerate(row):
                    color = FITS if plan.fits else FITS_NOT
                    ax.add_patch(plt.Rectangle((across - 0.5, down - 0.5), 1, 1, color=color, linewidth=0))
                    text = f"{plan.needed_bytes / GB:,.0f}" + ("" if plan.fits else " ✗")
                    ax.text(across, down, text, ha="center", va="center", fontsize=8, color="black")
            ax.set_xticks(range(len(rows[0])), [f"{plan.cluster.world_size:,}" for plan in rows[0]])
            memory = [f"{row[0].cluster.device_memory_bytes / GB:.0f}" for row in rows]
            ax.set_yticks(range(len(rows)), memory)
            ax.set(xlim=(-0.5, len(rows[0]) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="ranks")
            ax.set(title=titled(smallest_that_fits(rows), name))
        axes[0][0].set(ylabel="memory of a device (GB)")
    put_in_words(fig, fits_in_words(plans))
    return fig, axes[0]


def plot_errors(rows: Sequence[ErrorRow]) -> tuple[Figure, Axes]:
    """Plot the errors of predictions in percent: a mark for each run, a column for each variant, a marker per model."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    with figure_style():
        fig, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
        for shift, (model, marker) in enumerate(zip(models, MARKERS, strict=False)):
            for real in (True, False):
                chosen = [row for row in rows if (row.model, row.real) == (model, real)]
                if not chosen:
                    continue
                beside = MODEL_SHIFT * (shift - (len(models) - 1) / 2)
                places = [variants.index(row.variant) + beside + (0.0 if real else 0.08) for row in chosen]
                color = SERIES_COLORS[1:][shift]
                look = {"facecolor": color if real else "none", "edgecolor": color, "marker": marker}
                label = f"{model}, {'real ranks' if real else 'a rank of N'}"
                ax.scatter(places, [100 * row.error for row in chosen], s=22, label=label, **look)
        ax.axhspan(-100 * NEAR, 100 * NEAR, color=FRAME_COLOR, alpha=0.2, zorder=0)
        ax.axhline(0, color=FRAME_COLOR, linewidth=0.8, zorder=0)
        ax.set_xticks(range(len(variants)), [variant.replace(" ", "\n") for variant in variants])
        finding = errors_within([row.error for row in rows], NEAR)
        ax.set(ylabel="predicted / measured - 1 (%)", title=f"{finding}; gray: {100 * NEAR:.0f} %")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    put_in_words(fig, sentences(finding, errors_in_words(rows)))
    return fig, ax
