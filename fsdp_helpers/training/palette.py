"""The colors shared by the live view and the chapters' figures, readable on both white and black pages."""

BLUE = "#0072b2"
TEXT_COLOR, FRAME_COLOR = "#767676", "#9ca3af"
TEXT_STYLE = {  # for matplotlib: figures have no background
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT_COLOR),
}
