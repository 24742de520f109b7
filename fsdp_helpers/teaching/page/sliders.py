"""Controls for a plan's figure: a verdict in large type above one bar for each number of ranks."""

from base64 import b64decode
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fsdp_helpers.planning.advice import changes_until_it_fits
from fsdp_helpers.planning.models import NAMED_MODELS, Subject, named_subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.plans import plot_waterfall
from fsdp_helpers.teaching.figures.style import RUN_FIRST, described_png

CHOICES: dict[str, tuple] = {
    "model": NAMED_MODELS,
    "ranks": (8, 16, 32, 64, 128, 256, 512, 1024),
    "device_gb": (24, 40, 80, 141),
    "precision": ("fp32", "bf16"),
    "recompute": (True, False),
}
BATCH = {"image": 8, "token": 8192}  # per rank
GREEN, RED = "#15803d", "#dc2626"


def plan_figure(model: str, ranks: int, device_gb: int, precision: str, recompute: bool) -> Figure:
    """Return a figure with a verdict for the chosen number of ranks, above a bar for each number of ranks.

    The memory axis depends only on the model. It extends past the largest device's memory, and past what a rank needs
    with the fewest ranks, bf16 and recomputation.
    """
    subject = named_subject(model)
    clusters = [Cluster(world_size=count, device_memory_bytes=device_gb * GB) for count in CHOICES["ranks"]]
    lean = Settings(batch=BATCH[subject.item], precision="bf16", activation_checkpointing="units")
    settings = replace(lean, precision=precision, activation_checkpointing="units" if recompute else "none")
    plans = [make_plan(subject, settings, cluster) for cluster in clusters]
    plan = plans[CHOICES["ranks"].index(ranks)]
    highest_gb = 1.1 * max(make_plan(subject, lean, clusters[0]).needed_bytes / GB, CHOICES["device_gb"][-1])
    summary = f"{model} on {ranks:,} ranks, {settings.batch:,} {plan.item}s on each, {precision}"
    needs = f"peak {plan.peak.bytes / GB:,.1f} GB, plus an allowance of {plan.cluster.allowance_bytes / GB:.0f} GB"
    verdict, advice = _verdict(plan, subject)
    fig, ax = plot_waterfall(plans, summary, chosen=ranks, highest_gb=highest_gb)
    ax.set_title(f"{summary}:\n{needs}{advice}", loc="left")
    mark, color = ("✓", GREEN) if plan.fits else ("✗", RED)
    fig.suptitle(f"{mark} {verdict}", x=0.01, ha="left", fontsize=15, weight="bold", color=color)
    return fig


def _verdict(plan: Plan, subject: Subject) -> tuple[str, str]:
    """Return the verdict in a few words and, if the plan doesn't fit, further changes that would make it fit."""
    if plan.fits:
        return f"fits, {plan.spare_bytes / GB:,.0f} GB free", ""
    too_much = f"{-plan.spare_bytes / GB:,.0f} GB too much"
    changes = changes_until_it_fits(plan, subject)
    if not changes:
        return f"{too_much}: use larger devices, or split layers across ranks (notebook 15)", ""
    first, *then = [text.partition(" (--")[0] for text, _ in changes]
    ending = "with that, it fits" if changes[-1][1].fits else "and it's still too much: use larger devices"
    return f"{too_much}: first {first}", "\n" + ", ".join([*(f"then {text}" for text in then), ending])


class Controls:
    """Widgets and, for pages that can't show them, their first frame as an image.

    The frame is an image whose value changes. `ipywidgets.interact` would display it in an `Output` widget, and without
    a browser, the client that executes the notebook has to answer for that widget. nbclient does so on the socket that
    carries the cell's reply, so it may miss that reply and wait until its timeout.
    """

    def __init__(self, box: Any, picture: str, metadata: dict[str, Any]) -> None:
        self.box, self.picture, self.metadata = box, picture, metadata

    def _repr_mimebundle_(self, **others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = self.box._repr_mimebundle_(**others) or {}
        bundle = found[0] if isinstance(found, tuple) else found
        still = {"image/png": self.picture, "text/plain": self.metadata["alt"]}
        return {**bundle, **still}, {"image/png": self.metadata}


def plan_controls(**chosen: Any) -> Controls | Figure:
    """Return controls above a plan that's redrawn when they change or, if ipywidgets is missing, the plan alone.

    `chosen` contains the arguments for `plan_figure`.
    """
    first = plan_figure(**chosen)
    try:
        import ipywidgets
    except ImportError:
        return first
    picture, metadata = _png(first)
    image = ipywidgets.Image(value=b64decode(picture), layout={"max_width": f"{metadata['width']}px"})
    look = {"style": {"description_width": "initial"}, "layout": {"width": "280px"}}
    controls = {
        name: ipywidgets.SelectionSlider(options=options, value=chosen[name], description=name, **look)
        if name in ("ranks", "device_gb")
        else ipywidgets.Dropdown(options=options, value=chosen[name], description=name, **look)
        for name, options in CHOICES.items()
    }

    def draw(_: object) -> None:
        fig = plan_figure(**{name: control.value for name, control in controls.items()})
        image.value = b64decode(_png(fig)[0])

    for control in controls.values():
        control.observe(draw, "value")
    row = ipywidgets.HBox(list(controls.values()), layout={"flex_flow": "row wrap"})
    return Controls(ipywidgets.VBox([row, image, ipywidgets.Label(RUN_FIRST)]), picture, metadata)


def _png(fig: Figure) -> tuple[str, dict[str, Any]]:
    plt.close(fig)
    shown = described_png(fig)
    assert shown is not None, "an empty figure"
    return shown
