"""The figures of notebook 08."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdp_helpers.teaching.figures.descriptions import put_in_words
from fsdp_helpers.teaching.figures.plot_words import orders_in_words
from fsdp_helpers.teaching.figures.style import OP_COLORS, figure_style
from fsdp_helpers.training.palette import TEXT_COLOR


def draw_gathers(orders: Mapping[str, Sequence[str]]) -> tuple[Figure, Axes]:
    """Draw a forward's order of events, one row per setting; entries are "gather 3" or "compute 3"."""
    with figure_style():
        fig, ax = plt.subplots(figsize=(9, 0.9 + 0.55 * len(orders)), layout="constrained")
        for row, order in enumerate(orders.values()):
            for place, entry in enumerate(order):
                gathers = entry.startswith("gather")
                color = OP_COLORS["all_gather"] if gathers else TEXT_COLOR
                ax.barh(row, 0.9, left=place, height=0.6, color=color)
                ax.text(place + 0.45, row, entry, ha="center", va="center", color="white")
        ax.set_yticks(range(len(orders)), list(orders))
        ax.set(xticks=[], ylim=(len(orders) - 0.5, -0.5), xlabel="order in forward →; numbers are blocks")
        ax.margins(x=0.01)
    put_in_words(fig, orders_in_words(orders))
    return fig, ax
