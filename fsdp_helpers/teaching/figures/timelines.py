"""Draw what ranks did on a timeline, using axes from `plots`."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import inf, isfinite, isinf

from matplotlib.axes import Axes

from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, OffloadCopy
from fsdp_helpers.quantities import KB, MB, format_bytes
from fsdp_helpers.records import Collective, StepTrace
from fsdp_helpers.teaching.figures.style import OP_COLORS, PEAK_COLOR, PHASE_COLORS, SERIES_COLORS, height_of, swatches
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

NARROW = 0.08  # share of the timeline: a bar narrower than this has no room for its number
NAME_ROOM = 0.03  # share of the timeline: two upright names closer than this would overlap
MOST_STEPS = 12  # that are numbered
FAINT = 0.35  # a bar's opacity while its rank waits
ON_THE_RIGHT = {"loc": "upper left", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2, "handlelength": 1}


def length_s(traces: Mapping[int, StepTrace]) -> float:
    """Return when the last rank is done; after a collective that never ended, there's room for its bar."""
    times_s = [at_s for trace in traces.values() for seen in trace.collectives for at_s in (seen.start_s, seen.end_s)]
    ends_s = [trace.curve.end_s for trace in traces.values() if trace.curve.times_s]
    return max([*filter(isfinite, times_s), *ends_s, 1e-3]) * (1.0 if inf not in times_s else 1.15)


def draw_memory(ax: Axes, traces: Mapping[int, StepTrace]) -> None:
    """Draw the bytes allocated on each rank over time, with the phases of the first one or else its steps."""
    first = next(iter(traces.values()))
    for phase in first.curve.phases:
        ax.axvspan(1e3 * phase.start_s, 1e3 * phase.end_s, color=PHASE_COLORS[phase.name], linewidth=0)
        middle_ms = 500 * (phase.start_s + phase.end_s)
        ax.text(middle_ms, 0.02, phase.name, transform=ax.get_xaxis_transform(), ha="center", color=TEXT_COLOR)
    for number, end_s in enumerate(first.steps_s if not first.curve.phases else (), 1):
        ax.axvline(1e3 * end_s, color=FRAME_COLOR, linestyle=":", linewidth=1)
        if len(first.steps_s) <= MOST_STEPS:
            place = {"transform": ax.get_xaxis_transform(), "ha": "right", "va": "top"}
            ax.text(1e3 * end_s, 1.0, f"step {number} " if number == 1 else f"{number} ", color=TEXT_COLOR, **place)
    curves = {rank: trace.curve for rank, trace in traces.items() if trace.curve.times_s}
    highest_bytes = max([curve.peak_bytes for curve in curves.values()], default=0)
    unit, name = (MB, "MB") if highest_bytes >= MB / 10 else (KB, "kB")
    for (rank, curve), color in zip(curves.items(), cycle(SERIES_COLORS), strict=False):
        times_ms = [1e3 * time_s for time_s in (*curve.times_s, length_s(traces))]
        sizes = [size / unit for size in (*curve.allocated_bytes, curve.held_bytes)]
        label = f"rank {rank}: peak {format_bytes(curve.peak_bytes)}"
        ax.step(times_ms, sizes, where="post", color=color, linewidth=1.2, label=label)
    if curves:
        ax.legend(**ON_THE_RIGHT)
    top = 1.15 * max(highest_bytes, 1) / unit
    ax.set(xlabel="time (ms)", ylabel=f"allocated ({name})", xlim=(0, 1e3 * length_s(traces)), ylim=(0, top))


def draw_collectives(ax: Axes, traces: Mapping[int, StepTrace]) -> None:
    """Draw a row of bars for each rank, with the bytes that it sends where there's room, and the units above."""
    first, length_ms = next(iter(traces.values())), 1e3 * length_s(traces)
    for phase in first.curve.phases:
        ax.axvspan(1e3 * phase.start_s, 1e3 * phase.end_s, color=PHASE_COLORS[phase.name], linewidth=0)
    for row, trace in enumerate(traces.values()):
        for seen in trace.collectives:
            _draw_bar(ax, row, seen, length_ms)
    _name_units(ax, first.collectives, length_ms)
    _name_operations(ax, [seen for trace in traces.values() for seen in trace.collectives])
    ax.set_yticks(range(len(traces)), [f"rank {rank}" for rank in traces])
    ax.set(xlim=(0, length_ms), ylim=(len(traces) - 0.5, -0.5))


def _draw_bar(ax: Axes, row: int, seen: Collective, length_ms: float) -> None:
    """Draw a collective: faint while its rank waits for others, hatched if it never ended, marked if it's unequal."""
    start_ms, begins_ms, end_ms = 1e3 * seen.start_s, 1e3 * (seen.start_s + seen.waited_s), 1e3 * seen.end_s
    faint = {"alpha": FAINT, "label": "waiting"}
    if isinf(end_ms):
        begins_ms, faint = length_ms, {"alpha": FAINT, "label": "never ended", "hatch": "xxx"}
    if begins_ms > start_ms:
        ax.barh(row, begins_ms - start_ms, left=start_ms, **_look(seen.op) | faint)
    width_ms = max(min(end_ms, length_ms) - begins_ms, 0.004 * length_ms)  # wide enough to see
    ax.barh(row, width_ms, left=begins_ms, **_look(seen.op))
    if width_ms > NARROW * length_ms:
        place = {"ha": "center", "va": "center_baseline", "color": "white"}
        ax.text(begins_ms + width_ms / 2, row, format_bytes(seen.sent_bytes), **place)
    if seen.unequal:
        ax.text(begins_ms, row - 0.3, "≠", ha="center", va="bottom", color=PEAK_COLOR, weight="bold")


def _name_units(ax: Axes, collectives: Sequence[Collective], length_ms: float) -> None:
    """Write the units upright above the first rank's bars, where they fit."""
    names: dict[float, str] = {}
    for seen in collectives:
        if seen.unit and 1e3 * seen.start_s > max(names, default=-inf) + NAME_ROOM * length_ms:
            names[1e3 * seen.start_s] = seen.unit
    ax.secondary_xaxis("top").set_xticks(list(names), names.values(), rotation=90)


def draw_copies(ax: Axes, trace: StepTrace, copies: Sequence[OffloadCopy], units: Sequence[str]) -> None:
    """Draw collectives as bars in the first row, and below them each unit's copies to the device and to the host."""
    lines = ("collectives", TO_DEVICE, TO_HOST)
    for phase in trace.curve.phases:
        ax.axvspan(1e3 * phase.start_s, 1e3 * phase.end_s, color=PHASE_COLORS[phase.name], linewidth=0)
        ax.text(500 * (phase.start_s + phase.end_s), -0.55, phase.name, ha="center", va="bottom", color=TEXT_COLOR)
    for seen in trace.collectives:
        _draw_bar(ax, 0, seen, 1e3 * length_s({0: trace}))
    for unit, way, start_s in unit_copies(copies, units):
        line, time_ms = lines.index(way), 1e3 * (start_s - trace.began_s)
        ax.plot(time_ms, line, marker="v" if way == TO_DEVICE else "^", color=TEXT_COLOR, markersize=5)
        ax.text(time_ms, line + 0.2, unit.removeprefix("blocks."), ha="center", va="top")
    _name_operations(ax, trace.collectives)
    ax.set_yticks(range(len(lines)), lines)
    ax.set(xlabel="time in the step (ms)", ylim=(len(lines) - 0.4, -0.95))


def unit_copies(copies: Sequence[OffloadCopy], units: Sequence[str]) -> list[tuple[str, str, float]]:
    """Return the unit, direction and time of each group of copies; a group copies every parameter in a unit once."""
    found: list[tuple[str, str, float]] = []
    names: set[str] = set()  # of the parameters in the last group
    for copy in copies:
        unit = copy.unit(units)
        if not found or found[-1][:2] != (unit, copy.way) or copy.name in names:
            found.append((unit, copy.way, copy.start_s))
            names = set()
        names.add(copy.name)
    return found


def _look(op: str) -> dict:
    return {"color": _color(op), "height": height_of(op, 0.6), "linewidth": 0, "label": op.replace("_", "-")}


def _color(op: str) -> str:
    return OP_COLORS.get(op, TEXT_COLOR)


def _name_operations(ax: Axes, collectives: Sequence[Collective]) -> None:
    """Put a legend with each operation's color and height to the right of the axes."""
    ax.legend(handles=swatches({seen.op: _color(seen.op) for seen in collectives}), **ON_THE_RIGHT)
