"""The figures of notebook 08."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdp_helpers.quantities import MB
from fsdp_helpers.records import MemoryCurve
from fsdp_helpers.teaching.figures.style import OP_COLOURS, STATE_COLOURS, TEXT_COLOUR, figure_style


def plot_starts(
    curves: Mapping[str, MemoryCurve], whole_bytes: int, slices_bytes: int
) -> tuple[Figure, Sequence[Axes]]:
    """Bytes allocated on a rank while a model starts, one panel per way, beside the whole model and the slices."""
    with figure_style():
        fig, axes = plt.subplots(1, len(curves), figsize=(9, 2.8), sharey=True, layout="constrained", squeeze=False)
        for ax, (name, curve) in zip(axes[0], curves.items(), strict=True):
            _draw_start(ax, curve)
            ax.axhline(whole_bytes / MB, color=TEXT_COLOUR, linestyle="--", linewidth=1)
            ax.axhline(slices_bytes / MB, color=TEXT_COLOUR, linestyle=":", linewidth=1)
            ax.set_title(name.replace(", ", ",\n"), fontsize=9)
        first, last = axes[0][0], axes[0][-1]
        beside = {"transform": last.get_yaxis_transform(), "va": "center", "color": TEXT_COLOUR}  # where no curve is
        last.text(1.04, whole_bytes / MB, "the whole\nmodel", **beside)
        last.text(1.04, slices_bytes / MB, "its slices", **beside)
        first.set(ylabel="allocated on rank 0 (MB)", ylim=(0, None))
        fig.supxlabel("time in the start, each from its beginning to its end", fontsize=9)
    return fig, axes[0]


def _draw_start(ax: Axes, curve: MemoryCurve) -> None:
    """The curve from its first byte on; its scale is left out, since tracing makes some ways slower than others."""
    first = next((place for place, size in enumerate(curve.allocated_bytes) if size), 0)
    times_s, sizes = curve.times_s[first:], [size / MB for size in curve.allocated_bytes[first:]]
    ax.fill_between(times_s, sizes, step="post", color=STATE_COLOURS["parameters"], alpha=0.35, linewidth=0)
    ax.step(times_s, sizes, where="post", color=STATE_COLOURS["parameters"], linewidth=1)
    ax.set(xticks=[], xlim=(times_s[0], times_s[-1]))


def draw_gathers(orders: Mapping[str, Sequence[str]]) -> tuple[Figure, Axes]:
    """Draw a forward's order of events, one row per setting; entries are "gather 3" or "compute 3"."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(9, 0.9 + 0.55 * len(orders)), layout="constrained")
        for row, order in enumerate(orders.values()):
            for place, entry in enumerate(order):
                gathers = entry.startswith("gather")
                colour, hatch = (OP_COLOURS["all_gather"], "////") if gathers else (TEXT_COLOUR, None)
                ax.barh(row, 0.9, left=place, height=0.6, color=colour, hatch=hatch, edgecolor="white")
                box = {"facecolor": colour, "edgecolor": "none", "pad": 1}
                ax.text(place + 0.45, row, entry, ha="center", va="center", color="white", bbox=box)
        ax.set_yticks(range(len(orders)), list(orders))
        ax.set(xticks=[], ylim=(len(orders) - 0.5, -0.5), xlabel="order in forward; the numbers are the blocks'")
        ax.margins(x=0.01)
        ax.set_title("all-gathers (green, hatched) and arithmetic (grey)")
    return fig, ax
