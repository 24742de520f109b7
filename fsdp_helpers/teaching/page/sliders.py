"""Sliders that redraw a plan at each change; without widgets, the figure alone."""

from base64 import b64decode
from html import escape

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fsdp_helpers.planning.advice import verdict
from fsdp_helpers.planning.command import DEFAULT_BATCH
from fsdp_helpers.planning.models import NAMED_MODELS, named_subject
from fsdp_helpers.planning.plan import Cluster, Settings, make_plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.plans import plot_waterfall
from fsdp_helpers.teaching.figures.style import described_png

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
DEVICES_GB = (24, 40, 80, 141)


def draw_plan(
    model: str = "vit-10b",
    ranks: int = 128,
    device_gb: int = 80,
    precision: str = "bf16",
    recompute: bool = True,
) -> tuple[Figure, str]:
    """The waterfall of a model over all of RANKS, and the verdict for one of them."""
    subject = named_subject(model)
    checkpointing = "units" if recompute else "none"
    settings = Settings(batch=DEFAULT_BATCH[subject.item], precision=precision, activation_checkpointing=checkpointing)
    plans = {
        count: make_plan(subject, settings, Cluster(world_size=count, device_memory_bytes=device_gb * GB))
        for count in RANKS
    }
    title = f"{model}, {settings.batch:,} {subject.item}s on each rank, {precision}"
    fig, ax = plot_waterfall(list(plans.values()), title)
    ax.get_xticklabels()[RANKS.index(ranks)].set_fontweight("bold")
    return fig, f"On {ranks:,} ranks. {verdict(plans[ranks], subject)}"


def plan_controls() -> object | None:
    """Return controls, and below them a plan that is drawn anew at each change; None if ipywidgets is missing.

    The plan is an image and a line of text whose values change. ipywidgets' own `interactive` would display it in an
    `Output` widget, and what executes a notebook without a browser has to play that widget's other half: nbclient
    answers it on the socket on which it waits for the cell's reply, can miss the reply's arrival as it does so, and
    then waits until its time-out.
    """
    try:
        import ipywidgets
    except ImportError:
        return None
    controls = {
        "model": ipywidgets.Dropdown(options=NAMED_MODELS, value="vit-10b"),
        "ranks": ipywidgets.SelectionSlider(options=RANKS, value=128),
        "device_gb": ipywidgets.SelectionSlider(options=DEVICES_GB, value=80, description="device GB"),
        "precision": ipywidgets.ToggleButtons(options=("fp32", "bf16"), value="bf16"),
        "recompute": ipywidgets.Checkbox(value=True, description="recompute blocks"),
    }
    picture, words = ipywidgets.Image(format="png", layout={"max_width": "100%"}), ipywidgets.HTML()

    def draw(_: object = None) -> None:
        fig, said = draw_plan(**{name: control.value for name, control in controls.items()})
        png, size = described_png(fig)
        plt.close(fig)
        picture.width = str(size["width"])
        picture.tooltip = size["alt"]
        picture.value = b64decode(png)
        words.value = escape(said)

    for name, control in controls.items():
        control.description = control.description or name
        control.observe(draw, "value")
    draw()
    return ipywidgets.VBox([*controls.values(), picture, words])
