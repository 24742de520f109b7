"""The look of all figures: one colour per strategy through the series, one per kind of state."""

from contextlib import AbstractContextManager

import matplotlib.pyplot as plt

STATE_COLOURS = {"parameters": "#1d4ed8", "gradients": "#60a5fa", "optimiser": "#bfdbfe", "other": "#d1d5db"}
TEXT_COLOUR, FRAME_COLOUR = "#4b5563", "#9ca3af"
STYLE = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def figure_style() -> AbstractContextManager:
    """A context in which figures are drawn. The backend is loaded first: what it sets while loading must outlive it."""
    plt.switch_backend(plt.get_backend())
    return plt.rc_context(STYLE)
