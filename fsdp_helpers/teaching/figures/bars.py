"""Draw bars on axes from `plots`: a rank's bytes between steps, and its bytes at the peak."""

from collections.abc import Collection, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fsdp_helpers.planning.plan import CATEGORIES
from fsdp_helpers.planning.walk.fsdp2 import REDUCE
from fsdp_helpers.planning.walk.ledger import Peak, Term
from fsdp_helpers.planning.walk.units import COPY_OF_GLOO
from fsdp_helpers.quantities import MB, in_mb
from fsdp_helpers.records import ComparisonRow, LeverResult, RankRecord
from fsdp_helpers.teaching.figures.style import (
    FULL_GRADIENTS,
    GLOO_COPY,
    HATCH,
    PEAK_COLOR,
    PEAK_COLORS,
    STRATEGY_COLORS,
    ink_on,
)
from fsdp_helpers.training.palette import TEXT_COLOR

THIN = 0.36  # height of one of the two bars in a row
ROOM = 0.07  # share of the axis: a part narrower than this has no room for its number


def rows_of(runs: Mapping[str, Sequence[RankRecord]]) -> dict[str, tuple[str, RankRecord]]:
    """Map each row's label to a run's name and a record: one row per run, or one per rank if ranks differ."""
    rows = {}
    for name, ranks in runs.items():
        if len(ranks) == 1:
            rows[name] = (name, ranks[0])
        elif len({_as_written(rank) for rank in ranks}) == 1:
            rows[f"{name},\neach of {len(ranks)} ranks"] = (name, ranks[0])
        else:
            rows.update({f"{name}, rank {rank.rank}": (name, rank) for rank in ranks})
    return rows


def _as_written(record: RankRecord) -> tuple[str, ...]:
    return tuple(in_mb(size) for size in (*held_parts(record).values(), record.held_bytes, record.peak_bytes))


def held_parts(record: RankRecord) -> dict[str, int]:
    """Return a rank's bytes between steps, by kind."""
    own = {
        CATEGORIES["parameters"]: record.parameter_bytes,
        CATEGORIES["gradients"]: record.gradient_bytes,
        CATEGORIES["optimizer"]: record.optimizer_bytes,
    }
    return own | {CATEGORIES["buffers"]: max(0, record.held_bytes - sum(own.values()))}


def peak_parts(peak: Peak, alone: bool = False) -> dict[str, int]:
    """Return the bytes of a predicted peak by kind: full gradients and their shards, gloo's copies and other buffers.

    The input to FSDP2's reduce-scatter counts as full gradients, since its values are the same. A process
    that's `alone` has no other rank to average with, so its gradients count as gradients, as they do between steps.
    """
    parts = dict.fromkeys(PEAK_COLORS, 0)
    for term in peak.terms:
        parts[_kind_of(term, alone)] += term.bytes
    return parts


def _kind_of(term: Term, alone: bool) -> str:
    if term.kind == "gradients" and "shard" not in term.name or term.name.startswith(f"{REDUCE},"):
        return CATEGORIES["gradients"] if alone else FULL_GRADIENTS
    return GLOO_COPY if term.name.startswith(f"{COPY_OF_GLOO},") else CATEGORIES[term.kind]


def draw_rank(ax: Axes, row: int, record: RankRecord, peak: Peak, highest_bytes: int, alone: bool) -> set[str]:
    """Draw a row's two bars, and a line at the measured peak; return the kinds drawn. `alone` means one process."""
    held, parts = held_parts(record), peak_parts(peak, alone)
    above, below = row - THIN / 2 - 0.02, row + THIN / 2 + 0.02
    _draw_parts(ax, above, "held", held, highest_bytes)
    _draw_parts(ax, below, "at the peak", parts, highest_bytes)
    peak_mb = record.peak_bytes / MB
    ax.plot([peak_mb] * 2, [below - 0.24, below + 0.24], color=PEAK_COLOR, linewidth=2)
    right_mb = max(record.peak_bytes, peak.bytes) / MB
    ax.text(record.held_bytes / MB, above, f"  held {in_mb(record.held_bytes)}", va="center", color=TEXT_COLOR)
    ax.text(right_mb, below, f"  peak {in_mb(record.peak_bytes)}", va="center", color=PEAK_COLOR)
    return {kind for kind in PEAK_COLORS if held.get(kind) or parts[kind]}


def _draw_parts(ax: Axes, middle: float, when: str, parts: Mapping[str, int], highest_bytes: int) -> None:
    left = 0
    for kind, size in parts.items():
        if size:
            ax.barh(middle, size / MB, left=left / MB, height=THIN, label=f"{when}, {kind}", **_look(kind))
        if size > ROOM * highest_bytes:
            behind = {"facecolor": PEAK_COLORS[kind], "edgecolor": "none", "pad": 1}
            place = {"ha": "center", "va": "center", "bbox": behind}
            ax.text((left + size / 2) / MB, middle, in_mb(size), color=ink_on(PEAK_COLORS[kind]), **place)
        left += size


def keys(kinds: Collection[str]) -> list[Patch]:
    """Return one patch per kind for a legend, in the order of the bars."""
    return [Patch(label=kind, **_look(kind)) for kind in PEAK_COLORS if kind in kinds]


def _look(kind: str) -> dict:
    hatch = {"hatch": HATCH, "edgecolor": "white"} if kind == FULL_GRADIENTS else {}
    return {"facecolor": PEAK_COLORS[kind], "linewidth": 0, **hatch}


def draw_held_in_peak(ax: Axes, rows: Sequence[LeverResult | ComparisonRow]) -> None:
    """Draw each row's bytes at the peak (light) and, in front of them, its held bytes (solid and labeled)."""
    places, colors = range(len(rows)), [STRATEGY_COLORS[row.strategy] for row in rows]
    highest_bytes = max(row.peak_bytes for row in rows)
    ax.barh(places, [row.peak_bytes / MB for row in rows], color=colors, alpha=0.35, height=0.7, label="peak")
    ax.barh(places, [row.held_bytes / MB for row in rows], color=colors, height=0.7, label="held")
    for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
        if row.held_bytes > ROOM * highest_bytes:
            text = f"{in_mb(row.held_bytes)} "
            ax.text(row.held_bytes / MB, place, text, ha="right", va="center", color=ink_on(color))
    ax.invert_yaxis()


def draw_times(ax: Axes, rows: Sequence[LeverResult | ComparisonRow]) -> None:
    """Draw each row's step time as a bar, labeled with the time in ms."""
    times_ms = [1e3 * row.step_s for row in rows]
    ax.barh(range(len(rows)), times_ms, color=[STRATEGY_COLORS[row.strategy] for row in rows], height=0.7)
    for place, time_ms in enumerate(times_ms):
        ax.text(time_ms, place, f"  {time_ms:,.0f}", va="center", color=TEXT_COLOR)
    ax.set_yticks([])
    ax.invert_yaxis()
    ax.set(xlabel="step time, median (ms)", xlim=(0, 1.2 * max(times_ms)))
