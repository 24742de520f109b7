"""The look of all figures: one color per strategy throughout the series, and one per kind of state.

Color is never the only cue: a label, a hatch, a line pattern or a fixed order gives the same information.
"""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from html import escape
from typing import Any

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fsdp_helpers.planning.plan import CATEGORIES
from fsdp_helpers.teaching.figures.descriptions import describe
from fsdp_helpers.training.palette import BLUE, TEXT_STYLE

# After M. Okabe and K. Ito, "Color Universal Design", 2008: distinguishable with any type of color vision.
ORANGE, GREEN, VERMILION, PURPLE = "#e69f00", "#009e73", "#d55e00", "#cc79a7"
STATE_COLORS = {"parameters": BLUE, "gradients": "#56b4e9", "optimizer": "#c6e2f5"}
# A rank's bytes within a step: its state, and temporary buffers.
FULL_GRADIENTS = "full gradients"
GLOO_COPY = "gloo's copy (CPU only)"
PEAK_COLORS = {
    CATEGORIES["parameters"]: STATE_COLORS["parameters"],
    CATEGORIES["gradients"]: STATE_COLORS["gradients"],
    CATEGORIES["optimizer"]: STATE_COLORS["optimizer"],
    FULL_GRADIENTS: STATE_COLORS["gradients"],
    CATEGORIES["gathered"]: "#d97706",
    CATEGORIES["activations"]: "#059669",
    CATEGORIES["buffers"]: "#9ca3af",
    GLOO_COPY: "#4b5563",
}
STRATEGY_COLORS = {
    "local": "#6b7280",
    "ddp": BLUE,
    "fsdp": ORANGE,
    "fsdp-auto-wrap": GREEN,
    "fsdp-offload": PURPLE,
}
# For runs, ranks and units, in this order; strategies have their own.
SERIES_COLORS = ("#6b7280", BLUE, ORANGE, VERMILION, GREEN, PURPLE)
PHASE_COLORS = {"forward": "#38bdf82e", "backward": "#f59e0b2e", "step": "#9ca3af2e"}  # translucent
# Darker, since numbers are written on them in white, but still visible on a black page.
OP_COLORS = {
    "all_gather": "#00735c",
    "reduce_scatter": "#b34700",
    "all_reduce": BLUE,
    "broadcast": "#8b3fd1",
    "all_to_all": "#b0357f",
    "send": "#7c6a00",
}
REDUCING = ("reduce_scatter", "all_reduce")
HATCH = "////"  # one meaning in every figure: gradients of a rank's own images, not yet averaged
PEAK_COLOR = "#c2500a"
MARKERS = ("o", "s", "^", "D", "v", "P")
IN_WORDS = "font-size:0.85em;opacity:0.8;max-width:60em"
RUN_FIRST = "If the controls do nothing, run this cell first: a saved page only shows them."
FONT = "system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"  # for drawings in SVG
STYLE = {
    **TEXT_STYLE,
    "axes.prop_cycle": cycler(color=SERIES_COLORS),
    "figure.dpi": 110,
    "font.size": 9,  # on a slide, 18 of its 720 pixels if the figure is 8 inches wide; so no text is smaller
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def ink_on(color: str) -> str:
    """Return black or white, whichever is easier to read on a color."""
    red, green, blue = (value**2.2 for value in to_rgb(color))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue  # as in WCAG 2.2
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"


def height_of(op: str, row: float) -> float:
    """Return the height of a collective's bar in a row: bars of collectives that reduce are shorter."""
    return 0.55 * row if op in REDUCING else row


def swatches(colors: Mapping[str, str]) -> list[Line2D]:
    """Return one swatch per name for a legend, each as tall as that collective's bars."""
    look = {"linestyle": "-", "solid_capstyle": "butt"}
    return [
        Line2D([], [], color=color, linewidth=height_of(op, 8), label=op.replace("_", "-"), **look)
        for op, color in colors.items()
    ]


def figure_style() -> AbstractContextManager:
    """Return a context manager for the style. The backend is loaded first, so its settings outlast the context."""
    plt.switch_backend(plt.get_backend())
    _describe_in_notebook()
    return plt.rc_context(STYLE)


def _describe_in_notebook() -> None:
    """Make notebooks show figures at twice the resolution, with a folded description below each.

    A description that's only in a picture's metadata reaches exports, but JupyterLab doesn't show it.
    """
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        shell.display_formatter.ipython_display_formatter.for_type(Figure, show_described)


def show_described(fig: Figure) -> None:
    """Show a figure as a picture, and below it a line that unfolds to its description."""
    from IPython.display import HTML, display

    shown = described_png(fig)
    if shown is None:
        return
    picture, metadata = shown
    words = metadata["alt"]
    display({"image/png": picture, "text/plain": words}, metadata={"image/png": metadata}, raw=True)
    display(HTML(f'<details style="{IN_WORDS}"><summary>In words</summary>{escape(words)}</details>'))


def described_png(fig: Figure) -> tuple[str, dict[str, Any]] | None:
    """Return a figure as a base64 PNG, with its metadata: the display size and the description."""
    from IPython.core.pylabtools import retina_figure

    shown = retina_figure(fig, base64=True, bbox_inches="tight")
    if shown is None:  # an empty figure
        return None
    picture, size = shown
    return picture, {**size, "alt": describe(fig)}
