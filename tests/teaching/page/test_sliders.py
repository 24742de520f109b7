"""The controls of notebook 09: a verdict to be read from the last row, and a figure that keeps its scale."""

import re
import sys

import pytest

from fsdp_helpers.planning.models import NAMED_MODELS
from fsdp_helpers.teaching.page import sliders


def highest(picture: sliders.PlanPicture) -> set[str]:
    """The labels of the axis, which matplotlib writes as comments."""
    return {text for text in re.findall(r"<!-- ([\d,]+) -->", picture.svg) if text not in map(str, sliders.RANKS)}


def test_what_fits_says_how_much_is_free():
    picture = sliders.draw_plan(model="vit-10b", ranks=128, device_gb=80)
    assert picture.fits and re.fullmatch(r"fits, \d+ GB free", picture.verdict)
    assert f"color:{sliders.GREEN}" in picture._repr_html_() and "✓ fits" in picture._repr_html_()


def test_what_does_not_fit_says_by_how_much_and_what_to_change_first():
    picture = sliders.draw_plan(model="llama-70b", ranks=8, device_gb=24, precision="fp32", recompute=False)
    assert not picture.fits and re.match(r"\d+ GB too much: first [a-z]", picture.verdict)
    assert "--" not in picture.verdict and "; then " in picture.details
    assert f"color:{sliders.RED}" in picture._repr_html_() and f'aria-label="{picture.verdict}' in picture._repr_html_()


def test_the_verdict_is_that_of_the_numbers_in_it():
    # 16 bytes for each of 10,077,917,160 parameters over 8 ranks are 20.2 GB: below 80 GB, above what 24 GB leave
    assert sliders.draw_plan(ranks=8, device_gb=80).fits
    short = sliders.draw_plan(ranks=8, device_gb=24)
    needed_gb = sum(map(float, re.search(r"peak of ([\d.]+) GB and (\d+) GB", short.details).groups()))
    assert short.verdict.startswith(f"{needed_gb - 24:.0f} GB too much") and needed_gb > 24


def test_the_chosen_bar_alone_is_opaque():
    drawn = sliders.draw_plan(ranks=64).svg
    pale = [path for path in re.findall(r'<path d="[^"]*"[^>]*style="([^"]*)"', drawn) if "opacity: 0.3" in path]
    assert len(pale) == 7 * (len(sliders.RANKS) - 1)  # six categories and what is outside the count


@pytest.mark.parametrize("model", [NAMED_MODELS[3], NAMED_MODELS[-1]])
def test_the_axis_is_fixed_per_model(model):
    chosen = [{"precision": "fp32", "recompute": False}, {"precision": "bf16", "device_gb": 24}]
    assert len({sliders._highest_bytes(model) for _ in chosen}) == 1
    ends = [sliders.draw_plan(model=model, **one) for one in chosen]
    assert highest(ends[0]) & highest(ends[1])


def test_a_bar_beyond_the_axis_has_an_arrow():
    # 560 GB for each of 8 ranks, on an axis that ends at 1.1 x 156 GB
    beyond = sliders.draw_plan(model="llama-70b", ranks=8, precision="fp32", recompute=False)
    assert "<!-- 560 ↑ -->" in beyond.svg and "↑" not in sliders.draw_plan(model="llama-70b").svg


def test_controls_stand_in_one_row_and_draw_anew_at_each_change():
    widgets = pytest.importorskip("ipywidgets")
    controls = sliders.plan_controls(ranks=64)
    row, shown = controls.box.children
    by_name = {control.description: control for control in row.children}
    assert set(by_name) == {"model", "ranks", "device GB", "precision", "recompute blocks"}
    assert "vit-10b on 64 ranks" in shown.value
    by_name["ranks"].value = 1024
    assert "vit-10b on 1,024 ranks" in shown.value
    by_name["device GB"].value, by_name["ranks"].value = 24, 8
    assert "GB too much: first" in shown.value
    # nbclient, which answers an `Output` widget, can miss the reply to the cell and wait until its time-out
    assert not any(isinstance(part, widgets.Output) for part in (row, shown, *row.children))


def test_a_page_without_widgets_has_the_first_frame():
    pytest.importorskip("ipywidgets")
    controls = sliders.plan_controls(model="llama-8b", ranks=8)
    bundle = controls._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == controls.first._repr_html_() and "llama-8b on 8 ranks" in bundle["text/plain"]


def test_without_widgets_there_is_the_plan_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert sliders.plan_controls(model="llama-8b", ranks=8).words == sliders.draw_plan(model="llama-8b", ranks=8).words
