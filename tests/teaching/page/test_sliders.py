"""The controls of notebook 09: a verdict above a figure that keeps its scale, and a first frame for pages without widgets."""

import base64
import re
import sys

import matplotlib.pyplot as plt
import pytest

from fsdp_helpers.teaching.page import sliders

CHOSEN = {"model": "vit-10b", "ranks": 128, "device_gb": 80, "precision": "bf16", "recompute": True}


@pytest.fixture(autouse=True)
def no_window():
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "changes, verdict, color",
    [
        # 16 bytes for each of 10,077,917,160 parameters over 8 ranks are 20.2 GB: below 80 GB, above what 24 GB leave
        ({"ranks": 8}, r"✓ fits, \d+ GB free", sliders.GREEN),
        ({"ranks": 8, "device_gb": 24}, r"✗ \d+ GB too much: first [a-z].*", sliders.RED),
        (
            {"model": "llama-70b", "ranks": 8, "precision": "fp32", "recompute": False},
            r"✗ .* too much: .*",
            sliders.RED,
        ),
    ],
)
def test_the_verdict_is_that_of_the_numbers_below_it(changes, verdict, color):
    chosen = CHOSEN | changes
    fig = sliders.plan_figure(**chosen)
    fig.canvas.draw()
    said, below = fig._suptitle.get_text(), fig.axes[0].get_title("left")
    assert re.fullmatch(verdict, said) and fig._suptitle.get_color() == color
    peak_gb, allowance_gb = map(float, re.search(r"peak ([\d.]+) GB, plus an allowance of (\d+) GB", below).groups())
    spare = chosen["device_gb"] - peak_gb - allowance_gb
    assert int(re.search(r"(\d+) GB", said)[1]) == pytest.approx(abs(spare), abs=0.6)
    assert "--" not in said + below


def test_the_chosen_bar_alone_is_opaque_and_the_axis_is_the_models():
    figures = [sliders.plan_figure(**CHOSEN | more) for more in ({}, {"precision": "fp32", "recompute": False})]
    assert len({fig.axes[0].get_ylim() for fig in figures}) == 1
    opaque = [[bar.get_alpha() for bar in bars].index(1.0) for bars in figures[0].axes[0].containers]
    assert set(opaque) == {sliders.CHOICES["ranks"].index(128)}


def test_controls_draw_anew_at_each_change_and_pages_without_widgets_have_the_first_frame():
    widgets = pytest.importorskip("ipywidgets")
    controls = sliders.plan_controls(**CHOSEN)
    bundle, metadata = controls._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    row, shown = controls.box.children
    assert base64.b64decode(bundle["image/png"]) == shown.value
    assert "vit-10b on 128 ranks" in metadata["image/png"]["alt"] == bundle["text/plain"]
    by_name = {control.description: control for control in row.children}
    assert set(by_name) == set(CHOSEN)
    for name, value in {
        "model": "vit-b16",
        "ranks": 8,
        "device_gb": 24,
        "precision": "fp32",
        "recompute": False,
    }.items():
        before = shown.value
        by_name[name].value = value
        assert shown.value != before, name
    # nbclient, which answers an `Output` widget, can miss the reply to the cell and wait until its time-out
    assert not any(isinstance(part, widgets.Output) for part in (row, shown, *row.children))


def test_without_widgets_there_is_the_plan_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert sliders.plan_controls(**CHOSEN).axes[0].get_title("left").startswith("vit-10b on 128 ranks")
