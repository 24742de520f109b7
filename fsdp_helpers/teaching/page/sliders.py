"""Sliders that redraw a plan at each change: the verdict first, large, then a bar for each number of ranks."""

from base64 import b64encode
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape

from fsdp_helpers.planning.advice import changes_until_it_fits
from fsdp_helpers.planning.arguments import DEFAULT_BATCH
from fsdp_helpers.planning.models import NAMED_MODELS, Subject, named_subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.quantities import GB
from fsdp_helpers.teaching.figures.plan_picture import WIDTH, waterfall_svg

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
DEVICES_GB = (24, 40, 80, 141)
VERDICT = "font-size:1.6em;font-weight:700;line-height:1.3;color:"
SLIDER_WIDTH = "280px"
GREEN, RED = "#15803d", "#dc2626"  # legible, at this size, on white and on black


@dataclass(frozen=True, kw_only=True)
class PlanPicture:
    """A verdict, what it rests on, and the figure below it."""

    fits: bool
    verdict: str
    details: str
    svg: str

    @property
    def words(self) -> str:
        return f"{self.verdict}. {self.details}"

    def _repr_html_(self) -> str:
        mark, color = ("✓", GREEN) if self.fits else ("✗", RED)
        data = b64encode(self.svg.encode()).decode()
        return (
            f'<div style="{VERDICT}{color}" role="status">{mark} {escape(self.verdict)}</div>'
            f"<div>{escape(self.details)}</div>"
            f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.words)}" '
            f'style="width:100%;max-width:{WIDTH}px">'
        )

    def __repr__(self) -> str:
        return self.words


def draw_plan(
    model: str = "vit-10b",
    ranks: int = 128,
    device_gb: int = 80,
    precision: str = "bf16",
    recompute: bool = True,
) -> PlanPicture:
    """Return the verdict for one number of ranks, and the bars of all RANKS on an axis that is the model's own."""
    plans = {count: _on_devices(plan, device_gb) for count, plan in _plans(model, precision, recompute).items()}
    plan = plans[ranks]
    settings = plan.settings
    summary = f"{model} on {ranks:,} ranks, {settings.batch:,} {plan.item}s on each, {precision}"
    verdict, more = _verdict(model, ranks, device_gb, precision, recompute)
    needs = (
        f"the peak of {plan.peak.bytes / GB:,.1f} GB and {plan.cluster.allowance_bytes / GB:.0f} GB outside the count"
    )
    svg = waterfall_svg(list(plans.values()), ranks, _highest_bytes(model))
    return PlanPicture(fits=plan.fits, verdict=verdict, details=f"{summary}: {needs}{more}.", svg=svg)


@lru_cache
def _subject(model: str) -> Subject:
    return named_subject(model)


@lru_cache
def _plan(model: str, ranks: int, precision: str, recompute: bool) -> Plan:
    subject = _subject(model)
    checkpointing = "units" if recompute else "none"
    settings = Settings(batch=DEFAULT_BATCH[subject.item], precision=precision, activation_checkpointing=checkpointing)
    return make_plan(subject, settings, Cluster(world_size=ranks, device_memory_bytes=GB))


def _plans(model: str, precision: str, recompute: bool) -> dict[int, Plan]:
    return {count: _plan(model, count, precision, recompute) for count in RANKS}


def _on_devices(plan: Plan, device_gb: int) -> Plan:
    """Return the same plan on devices of that size; what a rank needs does not depend on it."""
    return replace(plan, cluster=replace(plan.cluster, device_memory_bytes=device_gb * GB))


@lru_cache
def _highest_bytes(model: str) -> float:
    """Return the end of the axis: above the largest device, and above the fewest ranks' needs in bf16, recomputing."""
    return 1.1 * max(_plan(model, RANKS[0], "bf16", True).needed_bytes, DEVICES_GB[-1] * GB)


@lru_cache
def _verdict(model: str, ranks: int, device_gb: int, precision: str, recompute: bool) -> tuple[str, str]:
    """Return the verdict in a few words, and what else would have to change for it to fit."""
    plan = _on_devices(_plan(model, ranks, precision, recompute), device_gb)
    if plan.fits:
        return f"fits, {plan.spare_bytes / GB:,.0f} GB free", ""
    too_much = f"{-plan.spare_bytes / GB:,.0f} GB too much"
    changes = changes_until_it_fits(plan, _subject(model))
    if not changes:
        return f"{too_much}: take larger devices, or tensor parallelism", ""
    first, *then = [text.partition(" (--")[0] for text, _ in changes]
    ending = "with that it fits" if changes[-1][1].fits else "and it is still too much: take larger devices"
    return f"{too_much}: first {first}", f"; {', '.join([*(f'then {text}' for text in then), ending])}"


def plan_controls(
    model: str = "vit-10b",
    ranks: int = 128,
    device_gb: int = 80,
    precision: str = "bf16",
    recompute: bool = True,
) -> object:
    """Return a row of controls above a plan that follows them or, if ipywidgets is missing, the plan alone.

    The plan is a text whose value changes. ipywidgets' own `interactive` would display it in an `Output` widget, and
    whatever executes a notebook without a browser then has to answer for that widget. nbclient does so on the socket
    that brings the cell's reply, may miss that reply, and then waits until its time-out.
    """
    try:
        import ipywidgets
    except ImportError:
        return draw_plan(model, ranks, device_gb, precision, recompute)
    narrow = {"style": {"description_width": "initial"}, "layout": {"width": "auto"}}
    to_drag = {**narrow, "layout": {"width": SLIDER_WIDTH}}  # left alone, a row leaves a slider no track
    controls = {
        "model": ipywidgets.Dropdown(options=NAMED_MODELS, value=model, description="model", **narrow),
        "ranks": ipywidgets.SelectionSlider(options=RANKS, value=ranks, description="ranks", **to_drag),
        "device_gb": ipywidgets.SelectionSlider(
            options=DEVICES_GB, value=device_gb, description="device GB", **to_drag
        ),
        "precision": ipywidgets.Dropdown(options=("fp32", "bf16"), value=precision, description="precision", **narrow),
        "recompute": ipywidgets.Checkbox(value=recompute, description="recompute blocks", indent=False, **narrow),
    }
    shown = ipywidgets.HTML()

    def draw(_: object = None) -> None:
        shown.value = draw_plan(**{name: control.value for name, control in controls.items()})._repr_html_()

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    row = ipywidgets.HBox(list(controls.values()), layout={"flex_flow": "row wrap", "align_items": "center"})
    return ipywidgets.VBox([row, shown])
