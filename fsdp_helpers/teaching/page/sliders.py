"""Controls that redraw a plan at each change: first the verdict, large, then a bar per number of ranks."""

import io
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from typing import Any

import matplotlib.pyplot as plt

from fsdp_helpers.planning.advice import changes_until_it_fits
from fsdp_helpers.planning.models import NAMED_MODELS, Subject, named_subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.plans import plot_waterfall

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
DEVICES_GB = (24, 40, 80, 141)
BATCH = {"image": 8, "token": 8192}  # of each rank
VERDICT = "font-size:1.6em;font-weight:700;line-height:1.3;color:"
SLIDER_WIDTH = "280px"
GREEN, RED = "#15803d", "#dc2626"  # legible, at this size, on white and on black


@dataclass(frozen=True, kw_only=True)
class PlanPicture:
    """A verdict, the numbers behind it, and the figure below, an SVG."""

    fits: bool
    verdict: str
    details: str
    svg: str

    @property
    def words(self) -> str:
        return f"{self.verdict}. {self.details}"

    def _repr_html_(self) -> str:
        mark, color = ("✓", GREEN) if self.fits else ("✗", RED)
        return (
            f'<div style="{VERDICT}{color}" role="status">{mark} {escape(self.verdict)}</div>'
            f"<div>{escape(self.details)}</div>"
            f'<div role="img" aria-label="{escape(self.words)}" style="max-width:800px">{self.svg}</div>'
        )

    def __repr__(self) -> str:
        return self.words


def draw_plan(
    model: str = "vit-10b", ranks: int = 128, device_gb: int = 80, precision: str = "bf16", recompute: bool = True
) -> PlanPicture:
    """Return the verdict for one number of ranks, and the bars of all RANKS on an axis specific to the model."""
    plans = [_on_devices(_plan(model, count, precision, recompute), device_gb) for count in RANKS]
    plan = plans[RANKS.index(ranks)]
    summary = f"{model} on {ranks:,} ranks, {plan.settings.batch:,} {plan.item}s on each, {precision}"
    verdict, more = _verdict(plan, _subject(model))
    needs = (
        f"the peak of {plan.peak.bytes / GB:,.1f} GB and {plan.cluster.allowance_bytes / GB:.0f} GB outside the count"
    )
    fig, _ = plot_waterfall(plans, summary, chosen=ranks, highest_gb=_highest_bytes(model) / GB)
    svg = io.StringIO()
    fig.savefig(svg, format="svg")
    plt.close(fig)
    drawn = svg.getvalue()
    return PlanPicture(
        fits=plan.fits, verdict=verdict, details=f"{summary}: {needs}{more}.", svg=drawn[drawn.index("<svg") :]
    )


@lru_cache
def _subject(model: str) -> Subject:
    return named_subject(model)


@lru_cache
def _plan(model: str, ranks: int, precision: str, recompute: bool) -> Plan:
    subject = _subject(model)
    checkpointing = "units" if recompute else "none"
    settings = Settings(batch=BATCH[subject.item], precision=precision, activation_checkpointing=checkpointing)
    return make_plan(subject, settings, Cluster(world_size=ranks, device_memory_bytes=GB))


def _on_devices(plan: Plan, device_gb: int) -> Plan:
    """Return the same plan on devices of that size; a rank's needs don't depend on it."""
    return replace(plan, cluster=replace(plan.cluster, device_memory_bytes=device_gb * GB))


@lru_cache
def _highest_bytes(model: str) -> float:
    """Return the end of the axis: above the largest device, and above the needs of the fewest ranks in bf16 with recomputation."""
    return 1.1 * max(_plan(model, RANKS[0], "bf16", True).needed_bytes, DEVICES_GB[-1] * GB)


def _verdict(plan: Plan, subject: Subject) -> tuple[str, str]:
    """Return the verdict in a few words, and what else would have to change to make it fit."""
    if plan.fits:
        return f"fits, {plan.spare_bytes / GB:,.0f} GB free", ""
    too_much = f"{-plan.spare_bytes / GB:,.0f} GB too much"
    changes = changes_until_it_fits(plan, subject)
    if not changes:
        return f"{too_much}: use larger devices, or split layers over ranks (15)", ""
    first, *then = [text.partition(" (--")[0] for text, _ in changes]
    ending = "with that it fits" if changes[-1][1].fits else "and it's still too much: use larger devices"
    return f"{too_much}: first {first}", f"; {', '.join([*(f'then {text}' for text in then), ending])}"


class Controls:
    """Widgets and, for pages without widgets, their first frame.

    The frame is a text whose value changes. `ipywidgets.interact` would display it in an `Output` widget, and whatever
    executes a notebook without a browser then has to answer for that widget. nbclient does so on the socket that brings
    the cell's reply, may miss that reply, and then waits until its time-out.
    """

    def __init__(self, box: Any, first: PlanPicture) -> None:
        self.box, self.first = box, first

    def _repr_mimebundle_(self, **others: Any) -> dict[str, Any]:
        found = self.box._repr_mimebundle_(**others) or {}
        bundle = found[0] if isinstance(found, tuple) else found
        return {**bundle, "text/html": self.first._repr_html_(), "text/plain": repr(self.first)}


def plan_controls(**start: Any) -> object:
    """Return controls above a plan that follows them or, without ipywidgets, just the plan.

    `start` are arguments of `draw_plan`.
    """
    first = draw_plan(**start)
    try:
        import ipywidgets
    except ImportError:
        return first
    start = {"model": "vit-10b", "ranks": 128, "device_gb": 80, "precision": "bf16", "recompute": True} | start
    narrow = {"style": {"description_width": "initial"}, "layout": {"width": "auto"}}
    to_drag = {**narrow, "layout": {"width": SLIDER_WIDTH}}  # left alone, a row leaves a slider no track
    choices = {"model": NAMED_MODELS, "precision": ("fp32", "bf16")}
    controls: dict[str, Any] = {
        name: ipywidgets.Dropdown(options=options, value=start[name], description=name, **narrow)
        for name, options in choices.items()
    }
    for name, options in {"ranks": RANKS, "device_gb": DEVICES_GB}.items():
        words = name.replace("_gb", " GB")
        controls[name] = ipywidgets.SelectionSlider(options=options, value=start[name], description=words, **to_drag)
    words = "recompute blocks"
    controls["recompute"] = ipywidgets.Checkbox(value=start["recompute"], description=words, indent=False, **narrow)
    shown = ipywidgets.HTML(first._repr_html_())

    def draw(_: object) -> None:
        shown.value = draw_plan(**{name: control.value for name, control in controls.items()})._repr_html_()

    for control in controls.values():
        control.observe(draw, "value")
    row = ipywidgets.HBox(list(controls.values()), layout={"flex_flow": "row wrap", "align_items": "center"})
    return Controls(ipywidgets.VBox([row, shown]), first)
