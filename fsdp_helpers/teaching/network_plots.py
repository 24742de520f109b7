"""Figures of runs between machines: how long a step takes, and what crosses the cable."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fsdp_helpers.quantities import MB
from fsdp_helpers.teaching.style import OP_COLOURS, OP_HATCHES, STRATEGY_COLOURS, TEXT_COLOUR, figure_style

MBIT = 1e6
BAND = "from there up to the same and a step without network"


def plot_step_times(rates: Sequence[dict]) -> tuple[Figure, Axes]:
    """Measured step times over the bandwidth, and the two that the formula gives: its bytes alone, and with the step.

    Each of `rates` has `bits_per_s` (None: unlimited), `step_s` and `sent_bytes`, as the kept record holds them.
    """
    (unlimited_ms,) = [1000 * row["step_s"] for row in rates if row["bits_per_s"] is None]
    limited = [row for row in rates if row["bits_per_s"] is not None]
    bandwidths = [row["bits_per_s"] / MBIT for row in limited]
    between = np.geomspace(min(bandwidths), max(bandwidths))
    floor_ms = 1000 * 8 * limited[0]["sent_bytes"] / (between * MBIT)
    colour = STRATEGY_COLOURS["ddp"]
    with figure_style():
        fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
        ax.plot(between, floor_ms, "--", color=colour, label="sent bytes / bandwidth")
        ax.fill_between(between, floor_ms, floor_ms + unlimited_ms, color=colour, alpha=0.15, label=BAND)
        measured = [1000 * row["step_s"] for row in limited]
        ax.plot(bandwidths, measured, "o", color="black", label="measured")
        ax.axhline(unlimited_ms, linestyle=":", color=TEXT_COLOUR, label="measured, unlimited")
        ax.set(xscale="log", yscale="log", xlabel="bandwidth (Mbit/s)", ylabel="step time (ms)")
        ax.set_xticks(bandwidths, [f"{bandwidth:,.0f}" for bandwidth in bandwidths])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title("A step of ShallowNet under DDP, between two machines")
        ax.legend(fontsize=8)
    return fig, ax


def plot_shardings(shardings: Sequence[dict]) -> tuple[Figure, Sequence[Axes]]:
    """What a rank sends in a step, by collective, and how long the step takes; one bar per way of sharding."""
    names = [row["sharding"] for row in shardings]
    with figure_style():
        fig, (bytes_ax, time_ax) = plt.subplots(1, 2, figsize=(8, 2.4), layout="constrained", sharey=True)
        for op in dict.fromkeys(op for row in shardings for op in row["sent_bytes"]):
            sizes = [row["sent_bytes"].get(op, 0) / MB for row in shardings]
            before = [sum(_earlier(row["sent_bytes"], op)) / MB for row in shardings]
            bytes_ax.barh(names, sizes, left=before, color=OP_COLOURS[op], hatch=OP_HATCHES.get(op), label=op)
        time_ax.barh(names, [1000 * row["step_s"] for row in shardings], color=TEXT_COLOUR)
        bytes_ax.set(xlabel="sent by a rank (MB)", title="A step of FSDP, two ranks on each machine")
        bytes_ax.invert_yaxis()
        fig.legend(loc="outside lower center", ncols=3, fontsize=8)
        time_ax.set(xlabel="step time (ms)", title="at 200 Mbit/s between the machines")
    return fig, (bytes_ax, time_ax)


def _earlier(sent_bytes: dict[str, int], op: str) -> list[int]:
    """The bytes of the collectives that stand to the left of `op` in a bar."""
    ops = list(sent_bytes)
    return [sent_bytes[other] for other in ops[: ops.index(op)]] if op in ops else []
