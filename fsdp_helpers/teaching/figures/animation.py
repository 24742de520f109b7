"""An animation of one traced step: shards above, memory and collectives below, on one time axis.

Rank 0 is at the top, and rank 1 below it, upside down, so that their parameters face each other across the network. A
tensor's area shows its size in bytes. The picture works only for two ranks.

Each moving part has keyframes. `frame` reads them at one moment; `animated` passes all of them to the browser as CSS,
which plays the step in slow motion, in a loop. Without CSS, or for readers who turn motion off, the picture
doesn't move.
"""

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import inf
from os import PathLike
from pathlib import Path

from fsdp_helpers.measuring.unit_trace import RankUnits, UnitTrace
from fsdp_helpers.quantities import in_mb
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.figures.style import (
    FONT,
    IN_WORDS,
    OP_COLORS,
    PEAK_COLOR,
    RUN_FIRST,
    STATE_COLORS,
    height_of,
)
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

WIDTH, HEIGHT = 960, 590
LEFT, RIGHT, GAP = 140, 950, 4  # edges within the picture's width of 960; gap between two units
ROW, ROW_GAP = 22, 5  # Adam's two moments take two rows
TOPS = {"optimizer": (82, 276), "gradients": (131, 249), "parameters": (158, 222)}  # on rank 0, on rank 1
HATCHED = "url(#hatch)"
MANY = 8  # a unit's gradients are drawn one by one up to this number; more are drawn in this many groups
OTHER = {0: 1, 1: 0}
LANES, LANE = (340, 358), 12  # each rank's timeline
TOP, BOTTOM = 396, 532  # edges of the memory curve
PLAY_S, REST_S = 14.0, 2.0  # how long a step plays, and how long its end stays on screen
CURVE_POINTS, READINGS = 400, 80
CAPTIONS = {
    "forward": "Forward: shards come together, and full parameters are used",
    "backward": "Backward: full gradients (hatched); then each rank keeps its shard of their mean",
    "step": "Optimizer's step: each rank updates its own shards",
}
STYLE = f"text{{font-family:{FONT};font-size:13px;fill:{TEXT_COLOR}}}"
RUNS = f"g{{animation:{PLAY_S + REST_S:g}s linear infinite}}"
HATCH_PATTERN = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{STATE_COLORS["gradients"]}"/><rect width="2" height="6" fill="#fff"/></pattern>'
)


@dataclass(frozen=True, kw_only=True)
class Key:
    """A part's position and visibility at one moment; between two keyframes, the part moves at a constant speed."""

    time_s: float
    y: float = 0.0
    x: float = 0.0
    opacity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """An SVG element drawn at the origin of its motion, and its keyframes (only one if it never changes)."""

    shape: str
    keys: tuple[Key, ...] = (Key(time_s=0.0),)

    def at(self, time_s: float) -> Key:
        """Return the part's position and visibility at a time."""
        place = bisect_right([key.time_s for key in self.keys], time_s)
        if place in (0, len(self.keys)):
            return self.keys[min(place, len(self.keys) - 1)]
        first, second = self.keys[place - 1 : place + 1]
        done = (time_s - first.time_s) / (second.time_s - first.time_s)

        def between(name: str) -> float:
            return getattr(first, name) + done * (getattr(second, name) - getattr(first, name))

        return Key(time_s=time_s, x=between("x"), y=between("y"), opacity=between("opacity"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A unit's horizontal position, with its two halves: rank 0's shard and rank 1's shard."""

    left: float
    width: float

    def half(self, rank: int) -> "Place":
        return Place(left=self.left + rank * self.width / 2, width=self.width / 2)

    def fraction(self, start: float, end: float) -> "Place":
        return Place(left=self.left + start * self.width, width=(end - start) * self.width)

    def box(self, top: float, height: float, fill: str, more: str = "") -> str:
        return (
            f'<rect x="{self.left:.1f}" y="{top:g}" width="{self.width:.1f}" height="{height:g}" fill="{fill}"{more}/>'
        )


@dataclass(frozen=True)
class Picture:
    """An SVG with its description; notebooks show it as an image with alt text."""

    svg: str
    words: str

    def save(self, path: str | PathLike) -> None:
        Path(path).write_text(self.svg)

    def html(self) -> str:
        """Return an image that needs no other file and survives JupyterLab's sanitizer."""
        data = b64encode(self.svg.encode()).decode()
        look = f"width:100%;max-width:{WIDTH}px"
        return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.words)}" style="{look}">'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        folded = f'<details style="{IN_WORDS}"><summary>In words</summary>{escape(self.words)}</details>'
        return {"text/html": self.html() + folded, "text/plain": self.words}


def frame(step: UnitTrace, time_s: float) -> Picture:
    """Return a picture of the step at one moment, given in seconds from its start."""
    return _picture(step, "".join(_still(part, time_s) for part in _moving(step)), STYLE)


def animated(step: UnitTrace) -> Picture:
    """Return an animation of the step; its still image shows a middle unit's reduce-scatter."""
    moving = list(_moving(step))
    rules = "".join(_rule(number, part.keys, step.length_s) for number, part in enumerate(moving) if len(part.keys) > 1)
    motion = f"@media (prefers-reduced-motion:no-preference){{{RUNS}{rules}}}"
    drawn = "".join(_still(part, still_s(step), number) for number, part in enumerate(moving))
    return _picture(step, drawn, STYLE + motion)


def still_s(step: UnitTrace) -> float:
    """Return the time of the most telling moment: a middle unit's reduce-scatter."""
    reduce = step.ranks[0].reduces[step.units[len(step.units) // 2].name]
    return (reduce.start_s + 2 * reduce.end_s) / 3


def player(step: UnitTrace) -> object:
    """Return an animation with a play button and a slider, or a still image if ipywidgets is missing."""
    try:
        import ipywidgets
    except ImportError:
        return frame(step, still_s(step))
    last_ms = round(1e3 * step.length_s)
    play = ipywidgets.Play(min=0, max=last_ms, step=max(1, last_ms // 150), interval=100)
    scrub = ipywidgets.IntSlider(min=0, max=last_ms, description="time (ms)", layout={"width": "60%"})
    shown = ipywidgets.Image(format="svg+xml", layout={"width": "100%", "max_width": f"{WIDTH}px"})

    def show(_: object = None) -> None:
        shown.value = frame(step, scrub.value / 1e3).svg.encode()

    scrub.observe(show, "value")
    ipywidgets.jslink((play, "value"), (scrub, "value"))
    show()
    return ipywidgets.VBox([ipywidgets.HBox([play, scrub]), shown, ipywidgets.Label(RUN_FIRST)])


def in_words(step: UnitTrace) -> str:
    """Describe the picture, for readers who can't see it."""
    curve, below = step.ranks[0].trace.curve, [unit.name for unit in step.units[1:]]
    units = f"{len(step.units)} units, the root and {', '.join(below)}" if below else "one unit"
    return (
        f"One step of FSDP on two ranks, {step.model} in {units}, traced over {1e3 * step.length_s:.0f} ms. Between "
        f"steps, rank 0 has the left half of every tensor, rank 1 the right half: {in_mb(curve.held_bytes)} MB. In "
        "forward, an all-gather brings each unit's halves together on both ranks"
        + (
            "; after forward, each unit except the root is resharded, and all-gathered again in backward"
            if below
            else ""
        )
        + ". In backward, full gradients from the rank's own images appear, and a reduce-scatter leaves each rank its "
        f"half of their mean. Rank 0 has at most {in_mb(curve.peak_bytes)} MB."
    )


def _picture(step: UnitTrace, moving: str, style: str) -> Picture:
    words = in_words(step)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>One step of FSDP on two ranks, as it was traced</title><desc>{escape(words)}</desc>"
        f"<style>{style}</style><defs>{HATCH_PATTERN}</defs>{''.join(_fixed(step))}{moving}</svg>\n"
    )
    return Picture(svg, words)


def _moving(step: UnitTrace) -> Iterator[Part]:
    """Yield the parts that move: boxes, captions, the collective in progress, the cursor and its readings."""
    yield from parts(step)
    for text, start_s, end_s in captions(step):
        look = 'text-anchor="middle" font-weight="600" style="font-size:17px"'
        yield _for_a_while(_text((LEFT + RIGHT) / 2, 22, text, look), start_s, end_s)
    for text, seen in labeled_collectives(step):
        name = f"{text}, {in_mb(seen.bytes)} MB"
        label = _text((LEFT + RIGHT) / 2, 46, name, 'text-anchor="middle" font-weight="600"')
        swatch = _bar((LEFT + RIGHT) / 2 - 150, 36, 24, seen.op)
        yield _for_a_while(swatch + label, seen.start_s, seen.end_s)
    begin, end = Key(time_s=0.0, x=LEFT), Key(time_s=step.length_s, x=RIGHT)
    cursor = f'<path d="M0 {LANES[0] - 6}V{BOTTOM}" stroke="{PEAK_COLOR}" stroke-width="1.5"/>'
    yield Part(shape=cursor, keys=(begin, end))
    yield from _readings(step)


def places(step: UnitTrace) -> dict[str, Place]:
    """Return each unit's horizontal position; the width is proportional to the unit's bytes."""
    room = RIGHT - LEFT - GAP * (len(step.units) - 1)
    whole = sum(unit.full_bytes for unit in step.units)
    found, left = {}, float(LEFT)
    for unit in step.units:
        found[unit.name] = Place(left=left, width=room * unit.full_bytes / whole)
        left += found[unit.name].width + GAP
    return found


def parts(step: UnitTrace) -> Iterator[Part]:
    """Yield all boxes, from back to front.

    Raises ValueError if the number of ranks isn't two.
    """
    if len(step.ranks) != 2:
        raise ValueError(f"the picture has room for 2 ranks, but this step has {len(step.ranks)}")
    for unit, place in places(step).items():
        for rank, seen in enumerate(step.ranks):
            yield from _frames(place, rank)
            yield from _kept(place, rank)
            yield from _gradients(step, unit, place, rank, seen)
            yield from _gathered(step, unit, place, rank, seen)


def _frames(place: Place, rank: int) -> Iterator[Part]:
    look = f' stroke="{FRAME_COLOR}" stroke-width="0.8" fill-opacity="0.08"'
    for name, tops in TOPS.items():
        yield Part(shape=place.box(tops[rank], _height(name), FRAME_COLOR, look))


def _height(name: str) -> float:
    return 2 * ROW if name == "optimizer" else ROW


def _kept(place: Place, rank: int) -> Iterator[Part]:
    """Yield the shards of parameters and optimizer state, which are always visible."""
    for name in ("parameters", "optimizer"):
        yield Part(shape=place.half(rank).box(TOPS[name][rank], _height(name), STATE_COLORS[name]))


def _gathered(step: UnitTrace, unit: str, place: Place, rank: int, seen: RankUnits) -> Iterator[Part]:
    """Yield the other rank's parameter shard, which arrives with each all-gather and disappears on reshard."""
    top, its_top = TOPS["parameters"][rank], TOPS["parameters"][OTHER[rank]]
    keys: list[Key] = []
    for number, stay in enumerate(seen.stays[unit]):
        theirs = step.ranks[OTHER[rank]].stays[unit][number].gather
        begins_s = max(stay.gather.start_s, theirs.start_s)  # no data moves before both ranks have arrived
        keys += _blink(begins_s, its_top - top, stay.gather.end_s, 0, stay.freed_s)
    shape = place.half(OTHER[rank]).box(top, ROW, STATE_COLORS["parameters"], ' fill-opacity="0.85"')
    yield Part(shape=shape, keys=tuple(keys))


def _gradients(step: UnitTrace, unit: str, place: Place, rank: int, seen: RankUnits) -> Iterator[Part]:
    """Yield a unit's gradient boxes: a full gradient per tensor, the halves in transit, and the shard of the mean."""
    top, their_top = TOPS["gradients"][rank], TOPS["gradients"][OTHER[rank]]
    reduce, theirs = seen.reduces[unit], step.ranks[OTHER[rank]].reduces[unit]
    begins_s = max(reduce.start_s, theirs.start_s)
    mean = place.half(rank).box(top, ROW, STATE_COLORS["gradients"])
    yield Part(
        shape=mean,
        keys=(
            Key(time_s=0.0),
            *_switch(seen.zeroed_s, 1, 0),
            *_switch(reduce.end_s, 0, 1),
        ),
    )
    for where, at_s in _made(unit, place, seen):
        yield Part(shape=where.box(top, ROW, HATCHED), keys=tuple(_blink(at_s, 0, at_s, 0, begins_s)))
    own, other = (place.half(one).box(top, ROW, HATCHED) for one in (rank, OTHER[rank]))
    yield Part(shape=own, keys=tuple(_blink(begins_s, 0, begins_s, 0, reduce.end_s)))
    yield Part(shape=other, keys=tuple(_blink(begins_s, 0, theirs.end_s, their_top - top, theirs.end_s)))


def _made(unit: str, place: Place, seen: RankUnits) -> Iterator[tuple[Place, float]]:
    """Yield each gradient's position in the unit and the time it appears; the last one appears first."""
    made = [one for one in seen.gradients if one.unit == unit]
    whole = sum(one.bytes for one in made)
    group_bytes, end = whole / MANY, 1.0
    waiting = 0
    for number, one in enumerate(made):
        waiting += one.bytes
        if waiting >= group_bytes or number == len(made) - 1:
            yield place.fraction(max(0.0, end - waiting / whole), end), one.time_s
            end, waiting = end - waiting / whole, 0


def _switch(time_s: float, before: float, after: float) -> tuple[Key, Key]:
    return Key(time_s=time_s, opacity=before), Key(time_s=time_s, opacity=after)


def _blink(appears_s: float, from_y: float, arrives_s: float, to_y: float, goes_s: float) -> list[Key]:
    """Return the keyframes of a part that appears, moves, stays for a while, and disappears."""
    return [
        Key(time_s=appears_s, y=from_y, opacity=0),
        Key(time_s=appears_s, y=from_y),
        Key(time_s=arrives_s, y=to_y),
        Key(time_s=goes_s, y=to_y),
        Key(time_s=goes_s, y=to_y, opacity=0),
    ]


def labeled_collectives(step: UnitTrace) -> list[tuple[str, Collective]]:
    """Return rank 0's collectives in time order, each with a label that names the collective and its unit."""
    seen = step.ranks[0]
    gathers = [(f"all-gather: {unit}", stay.gather) for unit, stays in seen.stays.items() for stay in stays]
    reduces = [(f"reduce-scatter: {unit}", reduce) for unit, reduce in seen.reduces.items()]
    return sorted([*gathers, *reduces], key=lambda entry: entry[1].start_s)


def captions(step: UnitTrace) -> list[tuple[str, float, float]]:
    """Return a caption for each phase on rank 0, with start and end times."""
    phases = step.ranks[0].trace.curve.phases
    of_units = {"forward": "Forward: each unit is unsharded for its own pass, then resharded"}
    texts = CAPTIONS | (of_units if len(step.units) > 1 else {})
    ends_s = [*(later.start_s for later in phases[1:]), inf]
    return [(texts[phase.name], phase.start_s, end_s) for phase, end_s in zip(phases, ends_s, strict=True)]


def _readings(step: UnitTrace) -> Iterator[Part]:
    """Yield rank 0's allocated bytes as a number and as a dot on the curve, often enough for motion to look smooth."""
    curve = step.ranks[0].trace.curve
    for number in range(READINGS):
        start_s, end_s = (step.length_s * (number + more) / READINGS for more in (0, 1))
        size = curve.allocated_bytes[max(0, bisect_right(curve.times_s, start_s) - 1)]
        text = _text(RIGHT, TOP - 8, f"now {in_mb(size)} MB", 'text-anchor="end" font-weight="600"')
        yield _for_a_while(text, start_s, end_s if number < READINGS - 1 else inf)


def _for_a_while(shape: str, start_s: float, end_s: float) -> Part:
    """Return a part that's visible from `start_s` until `end_s`; infinity means until the animation ends."""
    appears = [Key(time_s=start_s, opacity=0), Key(time_s=start_s)] if start_s > 0 else [Key(time_s=0.0)]
    goes = [Key(time_s=end_s), Key(time_s=end_s, opacity=0)] if end_s < inf else []
    return Part(shape=shape, keys=(*appears, *goes))


def _fixed(step: UnitTrace) -> Iterator[str]:
    """Yield the parts that don't move: names, both timelines with their collectives, and rank 0's memory curve."""
    for unit, place in places(step).items():
        if place.width > 40 or len(step.units) == 1:
            yield _text(place.left + place.width / 2, 74, unit, 'text-anchor="middle"')
        else:
            yield _text(place.left, 74, unit, 'text-anchor="end"')
    for rank, rows in enumerate(((108, 147, 174), (302, 264, 237))):
        for name, y in zip(("optimizer", "gradients", "parameters"), rows, strict=True):
            yield _text(LEFT - 8, y, name, 'text-anchor="end"')
        yield _text(8, (147, 264)[rank], f"rank {rank}", 'font-weight="600"')
    yield from _lanes(step)
    yield from _curve(step)
    key = "filled: this rank has it · outlined: it doesn't · hatched: gradients from its own images only · area: bytes"
    yield _text(LEFT, HEIGHT - 12, key, 'style="font-size:12px"')


def _lanes(step: UnitTrace) -> Iterator[str]:
    """Yield each rank's collectives on a shared time axis."""
    yield _text(8, LANES[0] + 20, "collectives", 'font-weight="600"')
    for rank, (seen, top) in enumerate(zip(step.ranks, LANES, strict=True)):
        yield _text(LEFT - 8, top + 11, f"rank {rank}", 'text-anchor="end"')
        for one in seen.trace.collectives:
            left, right = _x(step, one.start_s), _x(step, one.end_s)
            yield _bar(left, top, max(1.5, right - left), one.op)


def _bar(left: float, top: float, width: float, op: str) -> str:
    """Return a collective as a bar in the lane that begins at `top`."""
    height = height_of(op, LANE)
    y = top + (LANE - height) / 2
    return f'<rect x="{left:.1f}" y="{y:g}" width="{width:.4g}" height="{height:g}" fill="{OP_COLORS[op]}"/>'


def _curve(step: UnitTrace) -> Iterator[str]:
    curve = step.ranks[0].trace.curve
    highest = 1.08 * max(curve.peak_bytes, ddp_bytes(step))

    def y(size: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * size / highest

    points = thinned(curve.times_s, curve.allocated_bytes)
    path = f"M{LEFT} {y(points[0][1]):.1f}" + "".join(f"H{_x(step, at):.1f}V{y(size):.1f}" for at, size in points[1:])
    yield f'<path d="{path}H{RIGHT}V{BOTTOM}H{LEFT}Z" fill="{STATE_COLORS["parameters"]}" fill-opacity="0.25"/>'
    yield f'<path d="{path}H{RIGHT}" fill="none" stroke="{STATE_COLORS["parameters"]}" stroke-width="1.5"/>'
    below = 0.0
    levels = ((curve.peak_bytes, "peak"), (ddp_bytes(step), "DDP holds"), (curve.held_bytes, "held"))
    for size, text in sorted(levels, reverse=True):
        yield f'<path d="M{LEFT} {y(size):.1f}H{RIGHT}" stroke="{TEXT_COLOR}" stroke-dasharray="2 4"/>'
        below = max(y(size) + 4, below + 15)  # texts must not overlap
        yield _text(LEFT - 8, below, f"{text} {in_mb(size)}", 'text-anchor="end"')
    yield f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{FRAME_COLOR}"/>'
    for phase in curve.phases:
        start, end = _x(step, phase.start_s), _x(step, phase.end_s)
        yield f'<path d="M{start:.1f} {LANES[0] - 6}V{BOTTOM}" stroke="{FRAME_COLOR}" stroke-width="0.8"/>'
        if end - start > 60:
            yield _text((start + end) / 2, BOTTOM + 16, f"{phase.name}", 'text-anchor="middle"')
    yield _text(RIGHT, BOTTOM + 16, f"{1e3 * step.length_s:.0f} ms", 'text-anchor="end"')
    yield _text(8, TOP - 8, "on rank 0 (MB)", 'font-weight="600"')


def ddp_bytes(step: UnitTrace) -> int:
    """Return how many bytes a DDP rank holds between steps: 20 per parameter, 4 of them in its buckets."""
    return 20 * sum(unit.full_bytes for unit in step.units) // 4


def thinned(times_s: tuple[float, ...], sizes: tuple[int, ...]) -> list[tuple[float, int]]:
    """Return the memory curve thinned to about CURVE_POINTS points: the highest in each interval."""
    kept: dict[int, tuple[float, int]] = {}
    for at_s, size in zip(times_s, sizes, strict=True):
        stretch = int(CURVE_POINTS * at_s / (times_s[-1] or 1))
        if stretch not in kept or size > kept[stretch][1]:
            kept[stretch] = (at_s, size)
    return list(kept.values())


def _x(step: UnitTrace, time_s: float) -> float:
    return LEFT + (RIGHT - LEFT) * time_s / step.length_s


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _still(part: Part, time_s: float, number: int | None = None) -> str:
    key = part.at(time_s)
    if len(part.keys) == 1:
        return part.shape
    if number is None and not key.opacity:
        return ""
    name = "" if number is None else f' class="a{number}"'
    place = f' transform="translate({key.x:.1f} {key.y:.1f})"' if key.x or key.y else ""
    return f'<g{name}{place} opacity="{key.opacity:g}">{part.shape}</g>'


def _rule(number: int, keys: tuple[Key, ...], length_s: float) -> str:
    """Return the CSS for one part's motion, with keyframes as fractions of the step plus the pause after it."""
    share = 100 * PLAY_S / (PLAY_S + REST_S) / length_s
    stops = {0.0: keys[0]}
    for key in keys:  # two keys at one time mean a jump; CSS would use the second for both
        at = round(share * key.time_s, 2)
        stops[at if at > max(stops) or not key.time_s else round(max(stops) + 0.01, 2)] = key
    stops[100.0] = keys[-1]
    moves = any((key.x, key.y) != (0, 0) for key in keys)
    text = "".join(f"{at:g}%{{{_css(key, moves)}}}" for at, key in stops.items())
    return f"@keyframes k{number}{{{text}}}.a{number}{{animation-name:k{number}}}"


def _css(key: Key, moves: bool) -> str:
    place = f"transform:translate({key.x:g}px,{key.y:g}px);" if moves else ""
    return f"{place}opacity:{key.opacity:g}"
