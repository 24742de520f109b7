"""The moving picture says what its trace says: bytes, times, and what each rank has at each moment."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdp_helpers.measuring.unit_trace import read_unit_trace
from fsdp_helpers.quantities import MB
from fsdp_helpers.teaching.figures import animation
from fsdp_helpers.teaching.figures.animation import HATCHED, LEFT, RIGHT, TOPS, Key, Part, places
from fsdp_helpers.teaching.figures.style import OP_COLORS, STATE_COLORS
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


def test_its_bytes_and_times_are_those_of_the_trace(step, kept):
    curve = step.ranks[0].trace.curve
    for size, name in ((curve.peak_bytes, "peak"), (curve.held_bytes, "held")):
        assert f"{name} {size / MB:.1f}" in texts(kept)
    assert f"{1e3 * step.length_s:.0f} ms" in texts(kept)
    high = {OP_COLORS["all_gather"]: animation.LANE}
    low = {OP_COLORS["reduce_scatter"]: 0.55 * animation.LANE}
    ends = [(top, top + animation.LANE) for top in animation.LANES]
    bars = [rect for rect in ElementTree.fromstring(kept).iter(f"{SVG}rect") if rect.get("fill") in high | low]
    drawn = [
        sorted(float(bar.get("x")) for bar in bars if top <= float(bar.get("y")) < bottom and bar.get("width") != "24")
        for top, bottom in ends
    ]
    assert {bar.get("fill"): float(bar.get("height")) for bar in bars} == pytest.approx(high | low)
    for rank, lefts in zip(step.ranks, drawn, strict=True):
        starts_s = [(left - LEFT) / (RIGHT - LEFT) * step.length_s for left in lefts]
        assert starts_s == pytest.approx([seen.start_s for seen in rank.trace.collectives], abs=1e-3)
    for unit in step.units:
        assert f"all-gather: {unit.name}, {unit.full_bytes / MB:.1f} MB" in texts(kept)


def parameters(svg: str, rank: int) -> float:
    """The width of all that a rank has of the parameters, where it has come to rest."""
    return sum(
        float(rect.get("width"))
        for group in [ElementTree.fromstring(svg), *ElementTree.fromstring(svg).iter(f"{SVG}g")]
        for rect in group.findall(f"{SVG}rect")
        if rect.get("fill") == STATE_COLORS["parameters"] and float(rect.get("y")) == TOPS["parameters"][rank]
        if group.get("transform") is None
    )


def test_a_rank_has_half_between_steps_and_one_more_half_of_a_unit_in_forward(step):
    between, blocks = animation.frame(step, step.length_s).svg, step.units[1:]
    widths = [parameters(between, rank) for rank in (0, 1)]
    room = RIGHT - LEFT - 4 * len(blocks)
    assert widths == pytest.approx([room / 2] * 2, abs=1)
    stay = step.ranks[0].stays[blocks[0].name][0]
    whole = sum(unit.full_bytes for unit in step.units)
    within = animation.frame(step, (stay.gather.end_s + stay.freed_s) / 2).svg
    more = (step.units[0].full_bytes + blocks[0].full_bytes) / whole * room / 2  # the root is whole, too
    assert parameters(within, 0) == pytest.approx(room / 2 + more, abs=1)


def hatched(svg: str, left: float) -> float:
    """The width of the hatched boxes from there on to the right."""
    boxes = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("fill") == HATCHED]
    return sum(float(box.get("width")) for box in boxes if float(box.get("x")) >= round(left, 1))


def test_gradients_are_hatched_until_they_are_reduced(step):
    unit, place = step.units[-1].name, places(step)[step.units[-1].name]
    seen = step.ranks[0]
    made_s = [made.time_s for made in seen.gradients if made.unit == unit]
    ends_s = [rank.reduces[unit].end_s for rank in step.ranks]
    starts_s = [rank.reduces[unit].start_s for rank in step.ranks]
    before, whole, after = (
        hatched(animation.frame(step, time_s).svg, place.left)
        for time_s in (min(made_s) - 1e-3, (max(made_s) + max(starts_s)) / 2, max(ends_s) + 1e-6)
    )
    assert before == after == 0
    assert place.width <= whole + 0.5 <= 2 * place.width + 1  # rank 0's are whole; rank 1 may be late


def test_a_part_moves_at_a_steady_pace_and_jumps_between_two_keys_of_one_time():
    keys = (Key(time_s=1, opacity=0), Key(time_s=1, y=10), Key(time_s=3, y=0), Key(time_s=3, opacity=0))
    part = Part(shape="", keys=keys)
    assert [part.at(time_s).opacity for time_s in (0, 0.9, 1, 2.9, 3, 9)] == [0, 0, 1, 1, 0, 0]
    assert [part.at(time_s).y for time_s in (1, 2, 2.5)] == [10, 5, 2.5]


def test_the_player_scrubs(step):
    box = animation.player(step)
    (play, scrub), shown = box.children[0].children, box.children[1]
    before = shown.value
    scrub.value = round(500 * step.length_s)
    assert shown.value == animation.frame(step, scrub.value / 1e3).svg.encode() != before
    assert play.max == scrub.max == round(1e3 * step.length_s)


def test_without_widgets_there_is_a_still_of_a_reduce_scatter(step, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    still = animation.player(step)
    assert still == animation.frame(step, animation.still_s(step))
    assert any(text.startswith("reduce-scatter: ") for text in texts(still.svg))
