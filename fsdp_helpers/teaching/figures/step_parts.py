"""A traced step as parts of a picture: what lies where, and when it comes, goes and moves. Two ranks.

Rank 0 lies above, rank 1 below it upside down, so that parameters face each other across the network. A tensor's area
is its bytes.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_helpers.measuring.unit_trace import RankUnits, UnitTrace
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.figures.style import STATE_COLORS
from fsdp_helpers.training.palette import FRAME_COLOR

LEFT, RIGHT, GAP = 140, 950, 4  # of the picture's width of 960; between two units
ROW, ROW_GAP = 22, 5  # Adam's two moments take two rows
TOPS = {"optimizer": (82, 276), "gradients": (131, 249), "parameters": (158, 222)}  # of rank 0, of rank 1
HATCH = "url(#hatch)"
MANY = 8  # gradients of a unit that are drawn one by one; more come in that many groups
OTHER = {0: 1, 1: 0}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A part's position at one moment, and whether it is visible; in between it moves at a steady pace."""

    time_s: float
    y: float = 0.0
    x: float = 0.0
    opacity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """An SVG element, drawn at the origin of its motion, and its keys in time; one key for what never changes."""

    shape: str
    keys: tuple[Key, ...] = (Key(time_s=0.0),)

    def at(self, time_s: float) -> Key:
        """Return its position at that time."""
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
    """A unit's place from left to right, with its halves: the shards of rank 0 and of rank 1."""

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


def places(step: UnitTrace) -> dict[str, Place]:
    """Return the place of each unit, as wide as its share of the bytes."""
    room = RIGHT - LEFT - GAP * (len(step.units) - 1)
    whole = sum(unit.full_bytes for unit in step.units)
    found, left = {}, float(LEFT)
    for unit in step.units:
        found[unit.name] = Place(left=left, width=room * unit.full_bytes / whole)
        left += found[unit.name].width + GAP
    return found


def parts(step: UnitTrace) -> Iterator[Part]:
    """Yield all boxes, those that lie behind the others first.

    Raises ValueError for a number of ranks other than two.
    """
    if len(step.ranks) != 2:
        raise ValueError(f"the picture has room for 2 ranks; this step has {len(step.ranks)}")
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
    """Yield the shards of parameters and optimizer state, which never leave."""
    for name in ("parameters", "optimizer"):
        yield Part(shape=place.half(rank).box(TOPS[name][rank], _height(name), STATE_COLORS[name]))


def _gathered(step: UnitTrace, unit: str, place: Place, rank: int, seen: RankUnits) -> Iterator[Part]:
    """Yield the other rank's parameter shard: it comes with each all-gather, and goes when the unit is freed."""
    top, its_top = TOPS["parameters"][rank], TOPS["parameters"][OTHER[rank]]
    keys: list[Key] = []
    for number, stay in enumerate(seen.stays[unit]):
        theirs = step.ranks[OTHER[rank]].stays[unit][number].gather
        begins_s = max(stay.gather.start_s, theirs.start_s)  # nothing flows before both are there
        keys += _blink(begins_s, its_top - top, stay.gather.end_s, 0, stay.freed_s)
    shape = place.half(OTHER[rank]).box(top, ROW, STATE_COLORS["parameters"], ' fill-opacity="0.85"')
    yield Part(shape=shape, keys=tuple(keys))


def _gradients(step: UnitTrace, unit: str, place: Place, rank: int, seen: RankUnits) -> Iterator[Part]:
    """Yield the shard of the mean until zero_grad, whole gradients tensor by tensor, and their halves on the way."""
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
        yield Part(shape=where.box(top, ROW, HATCH), keys=tuple(_blink(at_s, 0, at_s, 0, begins_s)))
    own, other = (place.half(one).box(top, ROW, HATCH) for one in (rank, OTHER[rank]))
    yield Part(shape=own, keys=tuple(_blink(begins_s, 0, begins_s, 0, reduce.end_s)))
    yield Part(shape=other, keys=tuple(_blink(begins_s, 0, theirs.end_s, their_top - top, theirs.end_s)))


def _made(unit: str, place: Place, seen: RankUnits) -> Iterator[tuple[Place, float]]:
    """Yield each gradient's place in the unit, and when it is there; the last in forward is the first in backward."""
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
    """Invisible, then on its way, then at rest, then gone."""
    return [
        Key(time_s=appears_s, y=from_y, opacity=0),
        Key(time_s=appears_s, y=from_y),
        Key(time_s=arrives_s, y=to_y),
        Key(time_s=goes_s, y=to_y),
        Key(time_s=goes_s, y=to_y, opacity=0),
    ]


def in_progress(step: UnitTrace) -> list[tuple[str, Collective]]:
    """Return every collective of rank 0 with a text that names it and its unit, in time."""
    seen = step.ranks[0]
    gathers = [(f"all-gather: {unit}", stay.gather) for unit, stays in seen.stays.items() for stay in stays]
    reduces = [(f"reduce-scatter: {unit}", reduce) for unit, reduce in seen.reduces.items()]
    return sorted([*gathers, *reduces], key=lambda entry: entry[1].start_s)
