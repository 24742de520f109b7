"""Draw one step of a run on a timeline, using axes from `plots`."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, OffloadCopy
from fsdp_helpers.quantities import MB, in_mb
from fsdp_helpers.records import Collective, MemoryCurve, StepTrace
from fsdp_helpers.teaching.figures.style import OP_COLORS, PHASE_COLORS, height_of, swatches
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

NARROW = 0.05  # share of the timeline: a bar narrower than this has no room for its number


def draw_memory_curve(ax: Axes, curve: MemoryCurve) -> None:
    times_ms = [1e3 * time_s for time_s in (*curve.times_s, curve.end_s)]
    sizes_mb = [size / MB for size in (*curve.allocated_bytes, curve.allocated_bytes[-1])]
    for phase in curve.phases:
        ax.axvspan(1e3 * phase.start_s, 1e3 * phase.end_s, color=PHASE_COLORS[phase.name], linewidth=0)
        middle_ms = 500 * (phase.start_s + phase.end_s)
        ax.text(middle_ms, 0.02, phase.name, transform=ax.get_xaxis_transform(), ha="center", color=TEXT_COLOR)
    ax.step(times_ms, sizes_mb, where="post", color=TEXT_COLOR, linewidth=1.2)
    peak_mb = curve.peak_bytes / MB
    ax.axhline(peak_mb, color=FRAME_COLOR, linestyle=":", linewidth=1)
    place = {"transform": ax.get_yaxis_transform(), "va": "center"}
    ax.text(1, peak_mb, f" peak {in_mb(curve.peak_bytes)} MB", color=TEXT_COLOR, **place)
    ax.set(xlabel="time in the step (ms)", ylabel="allocated (MB)", ylim=(0, 1.15 * peak_mb))


def draw_notes(ax: Axes, curve: MemoryCurve, notes: Mapping[str, float]) -> None:
    """Draw notes above the curve, to the right of their lines; later notes are lower, so no line crosses a note."""
    peak_mb = curve.peak_bytes / MB
    for above, (text, time_s) in enumerate(sorted(notes.items(), key=lambda note: note[1], reverse=True)):
        place = max(0, bisect_right(curve.times_s, time_s) - 1)
        height_mb = (1.12 + 0.12 * above) * peak_mb
        line = [curve.allocated_bytes[place] / MB, height_mb]
        ax.plot([1e3 * time_s] * 2, line, color=TEXT_COLOR, linewidth=0.8, marker="o", markevery=[0], markersize=3)
        ax.text(1e3 * time_s, height_mb, f" {text}", va="center", color=TEXT_COLOR)
    if notes:
        ax.set(ylim=(0, (1.12 + 0.12 * len(notes)) * peak_mb))


def draw_collectives(ax: Axes, traces: Sequence[StepTrace]) -> None:
    ends_s = [seen.end_s for trace in traces for seen in trace.collectives]
    ends_s += [phase.end_s for trace in traces for phase in trace.curve.phases]
    length_ms = 1e3 * max(ends_s, default=1e-3)
    for rank, trace in enumerate(traces):
        for phase in trace.curve.phases:
            width_ms = 1e3 * (phase.end_s - phase.start_s)
            look = {"color": PHASE_COLORS[phase.name], "height": 0.9, "label": phase.name}
            ax.barh(rank, width_ms, left=1e3 * phase.start_s, **look)
            if rank == 0:
                middle_ms = 1e3 * phase.start_s + width_ms / 2
                ax.text(middle_ms, -0.5, phase.name, ha="center", va="bottom", color=TEXT_COLOR)
        _draw_row(ax, rank, trace.collectives, length_ms)
    _name_operations(ax, [seen for trace in traces for seen in trace.collectives])
    ax.set_yticks(range(len(traces)), [f"rank {rank}" for rank in range(len(traces))])
    ax.set(xlim=(0, length_ms), ylim=(len(traces) - 0.5, -0.95))


def draw_copies(ax: Axes, trace: StepTrace, copies: Sequence[OffloadCopy], units: Sequence[str]) -> None:
    """Draw collectives as bars in the first row, and below them each unit's copies to the device and to the host."""
    lines = ("collectives", TO_DEVICE, TO_HOST)
    for phase in trace.curve.phases:
        ax.axvspan(1e3 * phase.start_s, 1e3 * phase.end_s, color=PHASE_COLORS[phase.name], linewidth=0)
        ax.text(500 * (phase.start_s + phase.end_s), -0.55, phase.name, ha="center", va="bottom", color=TEXT_COLOR)
    length_s = max([phase.end_s for phase in trace.curve.phases] + [seen.end_s for seen in trace.collectives])
    for seen in trace.collectives:
        width_s = max(seen.end_s - seen.start_s, 0.004 * length_s)  # wide enough to see
        ax.barh(0, 1e3 * width_s, left=1e3 * seen.start_s, **_look(seen.op))
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


def _draw_row(ax: Axes, rank: int, collectives: Sequence[Collective], length_ms: float) -> None:
    """Draw a bar for each collective; bars too narrow for a number are summed in a note at the end of the row."""
    narrow = []
    for seen in collectives:
        width_ms = 1e3 * (seen.end_s - seen.start_s)
        visible_ms = max(width_ms, 0.004 * length_ms)
        ax.barh(rank, visible_ms, left=1e3 * seen.start_s, **_look(seen.op))
        if width_ms > NARROW * length_ms:
            number = {"ha": "center", "va": "center_baseline", "color": "white"}
            ax.text(1e3 * seen.start_s + width_ms / 2, rank, in_mb(seen.sent_bytes), **number)
        else:
            narrow.append(seen.sent_bytes)
    if narrow:
        text = f" {len(narrow)} narrow bar{'s' * (len(narrow) > 1)}: {in_mb(sum(narrow))}"
        ax.text(length_ms, rank, text, va="center", color=TEXT_COLOR)


def _look(op: str) -> dict:
    return {"color": _color(op), "height": height_of(op, 0.6), "linewidth": 0, "label": op}


def _color(op: str) -> str:
    return OP_COLORS.get(op, TEXT_COLOR)


def _name_operations(ax: Axes, collectives: Sequence[Collective]) -> None:
    """Put a legend with each operation's color and height above the axes on the right, next to the title."""
    colors = {seen.op: _color(seen.op) for seen in collectives}
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    if colors:
        ax.legend(handles=swatches(colors), ncols=len(colors), **place)
