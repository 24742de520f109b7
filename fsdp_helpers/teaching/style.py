"""The look of all figures: one colour per strategy through the series, one per kind of state.

A colour never stands alone: a label, a hatch, a line's pattern or a fixed order says the same.
"""

from contextlib import AbstractContextManager

import matplotlib.pyplot as plt

STATE_COLOURS = {"parameters": "#1d4ed8", "gradients": "#60a5fa", "optimiser": "#bfdbfe", "other": "#d1d5db"}
STRATEGY_COLOURS = {
    "local": "#6b7280",
    "ddp": "#2563eb",
    "fsdp": "#d97706",
    "fsdp-auto-wrap": "#059669",
    "fsdp-offload": "#7c3aed",
}
SAVING_COLOURS = {"full": "#d97706", "sharded": "#059669", "asynchronous": "#2563eb"}
PHASE_COLOURS = {"forward": "#dcfce7", "backward": "#fee2e2", "step": "#fef9c3"}
OP_COLOURS = {"all_gather": "#047857", "reduce_scatter": "#dc2626", "all_reduce": "#2563eb", "broadcast": "#d97706"}
OP_HATCHES = {"reduce_scatter": "////", "all_reduce": "....", "broadcast": "xxxx"}
LINE_PATTERNS = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
TEXT_COLOUR, FRAME_COLOUR = "#4b5563", "#9ca3af"
STYLE = {
    "figure.facecolor": "white",  # on a dark page, too
    "axes.facecolor": "white",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "black"),
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
