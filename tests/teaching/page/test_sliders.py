"""The controls of notebook 09: a verdict to be read from the last row, and a figure that keeps its scale."""

import re
import sys
import time
from xml.etree import ElementTree

import pytest

from fsdp_helpers.planning.models import NAMED_MODELS
from fsdp_helpers.teaching.page import sliders

SVG = "{http://www.w3.org/2000/svg}"


def bars(picture: sliders.PlanPicture) -> dict[str, float]:
    """The opacity of each bar, by the number of ranks written below it."""
    tree = ElementTree.fromstring(picture.svg)
    names = [text.text for text in tree.findall(f"{SVG}text") if text.get("y") == "340"]
    return dict(zip(names, [float(group.get("opacity")) for group in tree.findall(f"{SVG}g")], strict=True))


def test_what_fits_says_how_much_is_free():
    picture = sliders.draw_plan(model="vit-10b", ranks=128, device_gb=80)
    assert picture.fits and re.fullmatch(r"fits, \d+ GB free", picture.verdict)
    assert f"color:{sliders.GREEN}" in picture._repr_html_() and "✓ fits" in picture._repr_html_()


def test_what_does_not_fit_says_by_how_much_and_what_to_change_first():
    picture = sliders.draw_plan(model="llama-70b", ranks=8, device_gb=24, precision="fp32", recompute=False)
    assert not picture.fits and re.match(r"\d+ GB too much: first [a-z]", picture.verdict)
    assert "--" not in picture.verdict and "; then " in picture.details
    assert f"color:{sliders.RED}" in picture._repr_html_() and f'alt="{picture.verdict}' in picture._repr_html_()


def test_the_verdict_is_that_of_the_numbers_in_it():
    # 16 bytes for each of 10,077,917,160 parameters over 8 ranks are 20.2 GB: below 80 GB, above what 24 GB leave
    assert sliders.draw_plan(ranks=8, device_gb=80).fits
    short = sliders.draw_plan(ranks=8, device_gb=24)
    needed_gb = sum(map(float, re.search(r"peak of ([\d.]+) GB and (\d+) GB", short.details).groups()))
    assert short.verdict.startswith(f"{needed_gb - 24:.0f} GB too much") and needed_gb > 24


def test_the_chosen_bar_alone_is_opaque():
    opacities = bars(sliders.draw_plan(ranks=64))
    assert list(opacities) == [f"{ranks:,}" for ranks in sliders.RANKS]
    assert {ranks for ranks, opacity in opacities.items() if opacity == 1} == {"64"}


@pytest.mark.parametrize("model", NAMED_MODELS)
def test_the_axis_is_fixed_per_model_and_nothing_leaves_the_picture(model):
    ends = set()
    for precision in ("fp32", "bf16"):
        for recompute in (True, False):
            picture = sliders.draw_plan(model=model, precision=precision, recompute=recompute)
            ends.add(re.search(r'y="48" text-anchor="end">([\d,]+)<', picture.svg)[1])
            tops = [float(rect.get("y")) for rect in ElementTree.fromstring(picture.svg).iter(f"{SVG}rect")]
            assert min(tops) >= 36
    assert len(ends) == 1


def test_a_bar_beyond_the_axis_has_an_arrow_and_its_number():
    # 560 GB for each of 8 ranks, on an axis that ends at 1.1 x 161 GB
    texts = [
        text.text
        for text in ElementTree.fromstring(
            sliders.draw_plan(model="llama-70b", ranks=8, precision="fp32", recompute=False).svg
        ).findall(f"{SVG}text")
    ]
    assert "560 ↑" in texts
    assert not any("↑" in text for text in re.findall(">([^<]*)<", sliders.draw_plan(model="llama-70b").svg))


def test_a_change_is_drawn_within_a_fifth_of_a_second():
    sliders.draw_plan(ranks=8)  # the plans of a model are made once
    start_s = time.process_time()
    for ranks in sliders.RANKS:
        sliders.draw_plan(ranks=ranks)
    assert (time.process_time() - start_s) / len(sliders.RANKS) < 0.2


def test_controls_stand_in_one_row_and_draw_anew_at_each_change():
    widgets = pytest.importorskip("ipywidgets")
    row, shown = sliders.plan_controls(ranks=64).children
    by_name = {control.description: control for control in row.children}
    assert list(by_name) == ["model", "ranks", "device GB", "precision", "recompute blocks"]
    assert "vit-10b on 64 ranks" in shown.value
    by_name["ranks"].value = 1024
    assert "vit-10b on 1,024 ranks" in shown.value
    by_name["device GB"].value, by_name["ranks"].value = 24, 8
    assert "GB too much: first" in shown.value
    # nbclient, which answers an `Output` widget, can miss the reply to the cell and wait until its time-out
    assert not any(isinstance(part, widgets.Output) for part in (row, shown, *row.children))


def test_without_widgets_there_is_the_plan_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert sliders.plan_controls(model="llama-8b", ranks=8) == sliders.draw_plan(model="llama-8b", ranks=8)
