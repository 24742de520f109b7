"""The controls of notebook 09: a verdict above a figure, and a first frame for pages without widgets."""

import base64
import re
import sys

import pytest

from fsdp_helpers.teaching.page import sliders

CHOSEN = {"model": "vit-10b", "ranks": 128, "device_gb": 80, "precision": "bf16", "recompute": True}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "changes, verdict",
    [
        # 16 bytes for each of 10,077,917,160 parameters over 8 ranks are 20.2 GB: below 80 GB, above what 24 GB leave
        ({"ranks": 8}, r"✓ fits, \d+ GB free"),
        ({"ranks": 8, "device_gb": 24}, r"✗ \d+ GB too much: first [a-z].*"),
        ({"model": "llama-70b", "ranks": 8, "precision": "fp32", "recompute": False}, r"✗ .* too much: .*"),
    ],
)
def test_the_verdict_is_that_of_the_numbers_below_it(changes, verdict):
    chosen = CHOSEN | changes
    fig = sliders.plan_figure(**chosen)
    fig.canvas.draw()
    said, below = fig._suptitle.get_text(), fig.axes[0].get_title("left")
    assert re.fullmatch(verdict, said)
    peak_gb, allowance_gb = map(float, re.search(r"peak ([\d.]+) GB, plus an allowance of (\d+) GB", below).groups())
    spare = chosen["device_gb"] - peak_gb - allowance_gb
    assert int(re.search(r"(\d+) GB", said)[1]) == pytest.approx(abs(spare), abs=0.6)
    opaque = [[bar.get_alpha() for bar in bars].index(1.0) for bars in fig.axes[0].containers]
    assert set(opaque) == {sliders.CHOICES["ranks"].index(chosen["ranks"])}


def test_controls_draw_anew_at_each_change_and_pages_without_widgets_have_the_first_frame(monkeypatch):
    pytest.importorskip("ipywidgets")
    controls = sliders.plan_controls(**CHOSEN)
    bundle, metadata = controls._repr_mimebundle_()
    row, shown, note = controls.box.children
    assert "run this cell first" in note.value  # on a saved page, nothing is drawn anew
    assert base64.b64decode(bundle["image/png"]) == shown.value
    assert "vit-10b on 128 ranks" in metadata["image/png"]["alt"] == bundle["text/plain"]
    others = {"model": "vit-b16", "ranks": 8, "device_gb": 24, "precision": "fp32", "recompute": False}
    for control in row.children:
        before = shown.value
        control.value = others.pop(control.description)
        assert shown.value != before, control.description
    assert others == {}
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert sliders.plan_controls(**CHOSEN).axes[0].get_title("left").startswith("vit-10b on 128 ranks")
