"""The moving picture says what its trace says: bytes, times, and what each rank has at each moment."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import get_data_path
from matplotlib.ft2font import FT2Font

from fsdp_helpers.measuring.unit_trace import read_unit_trace
from fsdp_helpers.quantities import MB
from fsdp_helpers.teaching.figures import animation
from fsdp_helpers.teaching.figures.animation import LEFT, RIGHT
from fsdp_helpers.teaching.figures.style import OP_COLORS
from fsdp_helpers.teaching.lessons.traced_step import KEPT_PICTURE, KEPT_TRACE

PROJECT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def step():
    return read_unit_trace(PROJECT / "notebooks" / KEPT_TRACE)


@pytest.fixture(scope="module")
def kept() -> str:
    return (PROJECT / "notebooks" / KEPT_PICTURE).read_text()


def texts(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_kept_picture_is_that_of_the_kept_trace(step, kept):
    assert kept == animation.animated(step).svg, "run `python -m fsdp_helpers.teaching.lessons.traced_step notebooks`"


def test_captions_fit_the_picture_with_the_widest_font(step):
    """DejaVu Sans is what Linux has; in bold, it's wider than the others."""
    font = FT2Font(f"{get_data_path()}/fonts/ttf/DejaVuSans-Bold.ttf")
    font.set_size(17, 72)
    for text, *_ in animation.captions(step):
        font.set_text(text)
        assert font.get_width_height()[0] / 64 / 2 < animation.WIDTH - (LEFT + RIGHT) / 2, text


def test_its_bytes_and_times_are_those_of_the_trace(step, kept):
    curve, said = step.ranks[0].trace.curve, texts(kept)
    assert {f"peak {curve.peak_bytes / MB:.1f}", f"held {curve.held_bytes / MB:.1f}"} <= set(said)
    assert f"{1e3 * step.length_s:.0f} ms" in said
    assert {f"all-gather: {unit.name}, {unit.full_bytes / MB:.1f} MB" for unit in step.units} <= set(said)
    ops = {OP_COLORS["all_gather"], OP_COLORS["reduce_scatter"]}
    bars = [rect.attrib for rect in ElementTree.fromstring(kept).iter(f"{SVG}rect") if rect.get("fill") in ops]
    for rank, top in zip(step.ranks, animation.LANES, strict=True):
        lane = [bar for bar in bars if top <= float(bar["y"]) < top + animation.LANE]
        starts_s = [(float(bar["x"]) - LEFT) / (RIGHT - LEFT) * step.length_s for bar in lane]
        assert sorted(starts_s) == pytest.approx([seen.start_s for seen in rank.trace.collectives], abs=1e-3)


def test_the_player_scrubs_and_without_widgets_there_is_a_still_of_a_reduce_scatter(step, monkeypatch):
    box = animation.player(step)
    (play, scrub), shown = box.children[0].children, box.children[1]
    assert "run this cell first" in box.children[2].value  # on a saved page, nothing moves
    before = shown.value
    scrub.value = round(500 * step.length_s)
    assert shown.value == animation.frame(step, scrub.value / 1e3).svg.encode() != before
    assert play.max == scrub.max == round(1e3 * step.length_s)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    still = animation.player(step)
    assert still == animation.frame(step, animation.still_s(step))
    assert any(text.startswith("reduce-scatter: ") for text in texts(still.svg))
