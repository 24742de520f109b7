"""Figures of runs between machines: how long a step takes, and how many bytes cross the cable."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from fsdp_helpers.planning.devices import TYPICAL_RANGE
from fsdp_helpers.planning.traffic import step_range_s
from fsdp_helpers.teaching.figures.descriptions import put_in_words
from fsdp_helpers.teaching.figures.findings import slowed_by, titled
from fsdp_helpers.teaching.figures.plot_words import bandwidths_in_words, sentences
from fsdp_helpers.teaching.figures.style import STRATEGY_COLORS, figure_style
from fsdp_helpers.training.palette import TEXT_COLOR

MBIT = 1e6
BAND = f"planned: full overlap to no overlap at {100 * TYPICAL_RANGE:.0f} % lower rates"


def plot_step_times(rates: Sequence[dict]) -> tuple[Figure, Axes]:
    """Plot measured step times against bandwidth, over the planner's range from the shortest to the longest step.

    Each of `rates` has `bits_per_s` (None: unlimited), `step_s` and `sent_bytes`, as in the saved run.
    """
    (unlimited_s,) = [row["step_s"] for row in rates if row["bits_per_s"] is None]
    limited = [row for row in rates if row["bits_per_s"] is not None]
    bandwidths = [row["bits_per_s"] / MBIT for row in limited]
    between = np.geomspace(min(bandwidths), max(bandwidths))
    network_s = 8 * limited[0]["sent_bytes"] / (between * MBIT)
    shortest_s, longest_s = zip(*(step_range_s(unlimited_s, one_s) for one_s in network_s), strict=True)
    color = STRATEGY_COLORS["ddp"]
    with figure_style():
        fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
        ax.plot(bandwidths, milli([row["step_s"] for row in limited]), "o", color=TEXT_COLOR, label="measured")
        ax.fill_between(between, milli(shortest_s), milli(longest_s), color=color, alpha=0.15, label=BAND)
        ax.plot(between, milli(network_s), "--", color=color, label="sent bytes / bandwidth")
        ax.axhline(1000 * unlimited_s, linestyle=":", color=TEXT_COLOR, label="measured, unlimited")
        ax.set(xscale="log", yscale="log", xlabel="bandwidth (Mbit/s)", ylabel="step time (ms)")
        ax.set_xticks(bandwidths, [f"{bandwidth:,.0f}" for bandwidth in bandwidths])
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.yaxis.set_minor_locator(NullLocator())
        measured_s = dict(zip(bandwidths, [row["step_s"] for row in limited], strict=True))
        finding, subject = slowed_by(measured_s, unlimited_s), "ShallowNet under DDP, between two machines"
        ax.set_title(titled(finding, subject))
        ax.legend(fontsize=8, loc="upper right")
    put_in_words(fig, sentences(subject, finding, bandwidths_in_words(rates)))
    return fig, ax


def milli(values: Sequence[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [1000 * value for value in values]
