"""Diagrams of step stages, units and GPU queues. None of them shows measured numbers.

Each function returns `fig, ax` or `fig, axes`. A rank has the state in the filled boxes, but not the state
in the empty frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fsdp_helpers.planning.streams import ARITHMETIC, COMMUNICATION, Span
from fsdp_helpers.teaching.figures.descriptions import put_in_words
from fsdp_helpers.teaching.figures.style import (
    HATCH,
    OP_COLORS,
    STATE_COLORS,
    figure_style,
    height_of,
    swatches,
)
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

WHOLE, SHARD, NOTHING, OWN = "whole", "shard", "nothing", "own"
IN_WORDS = {
    WHOLE: "in full on every rank",
    SHARD: "a shard on each rank",
    NOTHING: "none",
    OWN: "in full on every rank (from its own images only)",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a step: how much of the parameters, gradients and optimizer state each rank has.

    "own" means full gradients from the rank's own images, not yet averaged across ranks.
    """

    title: str
    parameters: str
    gradients: str
    optimizer: str
    leads_to: str = ""  # what happens between this stage and the next


FSDP_STEP = (
    Stage(title="between steps", parameters=SHARD, gradients=SHARD, optimizer=SHARD, leads_to="all-gather"),
    Stage(title="forward", parameters=WHOLE, gradients=NOTHING, optimizer=SHARD, leads_to="backward"),
    Stage(title="end of backward", parameters=WHOLE, gradients=OWN, optimizer=SHARD, leads_to="reduce-scatter"),
    Stage(title="optimizer's step", parameters=SHARD, gradients=SHARD, optimizer=SHARD),
)
DDP_STEP = (
    Stage(title="between steps", parameters=WHOLE, gradients=WHOLE, optimizer=WHOLE, leads_to="zero_grad"),
    Stage(title="forward", parameters=WHOLE, gradients=NOTHING, optimizer=WHOLE, leads_to="backward"),
    Stage(title="end of backward", parameters=WHOLE, gradients=OWN, optimizer=WHOLE, leads_to="all-reduce"),
    Stage(title="optimizer's step", parameters=WHOLE, gradients=WHOLE, optimizer=WHOLE),
)
STEPS = {"DDP": DDP_STEP, "FSDP": FSDP_STEP}
ROWS = ("parameters", "gradients", "optimizer")
KEY = "filled: this rank has it · outlined: it's on the other rank, or nowhere · hatched: from this rank's own images only"


def draw_step(strategy: str, num_ranks: int = 2) -> tuple[Figure, Axes]:
    """Draw each rank's state at each stage of a step: one box per rank and stage, one bar per kind of state.

    `strategy` is "DDP" or "FSDP".
    """
    stages = STEPS[strategy]
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 0.9 + 1.15 * num_ranks), layout="constrained")
        for column, stage in enumerate(stages):
            ax.text(column + 0.36, -0.08, f"{column + 1}  {stage.title}", ha="center", va="bottom", weight="bold")
            for rank in range(num_ranks):
                _draw_rank(ax, column, rank, stage, num_ranks)
            if stage.leads_to:
                _draw_arrow(ax, column + 0.75, num_ranks / 2 - 0.05, stage.leads_to)
        for rank in range(num_ranks):
            ax.text(-0.47, rank + 0.42, f"rank {rank}", ha="right", va="center", weight="bold")
            for row, name in enumerate(ROWS):
                ax.text(-0.03, rank + _top_of(row) + 0.1, name, ha="right", va="center", color=TEXT_COLOR)
        ax.text(-0.72, num_ranks + 0.1, KEY, va="top", color=TEXT_COLOR)
        ax.set(xlim=(-0.74, len(stages) - 0.25), ylim=(num_ranks + 0.25, -0.28))
        ax.axis("off")
    put_in_words(fig, " ".join(_in_words(number, stage) for number, stage in enumerate(stages, start=1)))
    return fig, ax


def _in_words(number: int, stage: Stage) -> str:
    has = ", ".join(f"{name} {IN_WORDS[getattr(stage, name)]}" for name in ROWS)
    return f"Stage {number}, {stage.title}: {has}." + (f" Next: {stage.leads_to}." if stage.leads_to else "")


def _draw_rank(ax: Axes, column: int, rank: int, stage: Stage, num_ranks: int) -> None:
    for row, name in enumerate(ROWS):
        has = getattr(stage, name)
        for part in range(num_ranks):
            left, width = column + 0.72 * part / num_ranks, 0.72 / num_ranks
            filled = has in (WHOLE, OWN) or (has == SHARD and part == rank)
            box = Rectangle((left, rank + _top_of(row)), width, 0.2, facecolor=STATE_COLORS[name], linewidth=0)
            if has == OWN:
                box.set(hatch=HATCH, edgecolor="white")
            if filled:
                ax.add_patch(box)
            frame = Rectangle((left, rank + _top_of(row)), width, 0.2, fill=False, edgecolor=FRAME_COLOR, linewidth=0.8)
            ax.add_patch(frame)


def _top_of(row: int) -> float:
    return 0.06 + 0.26 * row


def _draw_arrow(ax: Axes, left: float, middle: float, label: str) -> None:
    ax.annotate("", (left + 0.22, middle), (left, middle), arrowprops={"arrowstyle": "-|>", "color": TEXT_COLOR})
    ax.text(left + 0.11, middle - 0.05, label, ha="center", va="bottom", color=TEXT_COLOR)


def draw_units(units: Sequence[str]) -> tuple[Figure, Axes]:
    """Draw when a rank has full parameters and gradients during an FSDP2 step, one row per unit (root first).

    Time runs to the right: forward through the units, then backward through them in reverse. The root stays unsharded
    from its first all-gather to the end of backward, and its gradients stay full from the start of backward, since the
    model ends with a head that belongs to the root. Every other unit is unsharded twice, the second time while backward
    is still computing the unit after it. In each row, parameters are above gradients, because both exist at once.
    """
    root, *below = units
    turn = len(below) + 0.25  # forward ends
    end = turn + len(below) + 0.5
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 0.9 + 0.5 * len(units)), layout="constrained")
        _draw_stretch(ax, 0, 0, end, "parameters, unsharded from forward to the end of backward")
        _draw_stretch(ax, 0, turn, end, "gradients, the head's first, reduced with the last", gradients=True)
        for row, _ in enumerate(below, start=1):
            backward = turn + len(below) - row  # the last unit first
            _draw_stretch(ax, row, row - 1, row, "parameters")
            ahead = min(1, backward - turn)  # backward begins with the last unit, so nothing comes before it
            label = "parameters, unsharded early" if ahead else "parameters"
            _draw_stretch(ax, row, backward - ahead, backward + 1, label)
            _draw_stretch(ax, row, backward, backward + 1, "gradients", gradients=True)
        ax.axvline(turn, color=TEXT_COLOR, linestyle=":", linewidth=1)
        for middle, label in ((turn / 2, "forward"), ((turn + end) / 2, "backward")):
            ax.text(middle, -0.62, label, ha="center", va="bottom", weight="bold")
        ax.set_yticks(range(len(units)), [f"{root} (root)", *below])
        ax.set_xticks([])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        ax.set(xlim=(-0.05, end + 0.05), ylim=(len(units) - 0.4, -0.7), xlabel="time in the step →")
    early = f" Unsharded one unit early in backward: {', '.join(below[-2::-1])}." if len(below) > 1 else ""
    put_in_words(
        fig,
        f"One rank, one step. Forward runs through {', '.join(below)}, backward through them in reverse. The root, {root}, "
        "stays unsharded from its first all-gather to the end of backward, and is reduced last. Each other unit is unsharded "
        f"for its own forward, resharded, and unsharded again for its backward, next to its full gradients.{early}",
    )
    return fig, ax


def _draw_stretch(ax: Axes, row: int, start: float, end: float, label: str, gradients: bool = False) -> None:
    color = STATE_COLORS["gradients" if gradients else "parameters"]
    lane = row + 0.17 if gradients else row - 0.17
    ax.barh(lane, end - start, left=start, height=0.32, color=color, edgecolor="white")
    ax.text((start + end) / 2, lane, label, ha="center", va="center", color="black" if gradients else "white")


def draw_streams(choices: Mapping[str, Sequence[Span]], given: str) -> tuple[Figure, Axes]:
    """Draw a GPU's two queues for each choice, one above the other; `given` names what the times are computed from."""
    colors = {"forward": FRAME_COLOR, "backward": TEXT_COLOR, **OP_COLORS}
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 0.9 + 0.9 * len(choices)), layout="constrained")
        names = []
        for name, spans in choices.items():
            for queue in (ARITHMETIC, COMMUNICATION):
                for span in (span for span in spans if span.queue == queue):
                    _draw_span(ax, len(names), span, colors[span.op])
                names.append(f"{name}: {queue}")
        handles = swatches({span.op: colors[span.op] for spans in choices.values() for span in spans})
        fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), title="numbers are units")
        ax.set_yticks(range(len(names)), names)
        ax.set(ylim=(len(names) - 0.5, -0.5), xlabel=f"time (ms), not measured: computed from {given}")
    told = [f"Two queues of a GPU, arithmetic and communication, computed from {given}."]
    for name, spans in choices.items():
        end_s = max(span.end_s for span in spans)
        busy_s = sum(span.end_s - span.start_s for span in spans if span.queue == ARITHMETIC)
        told.append(f"{name}: {1e3 * end_s:.1f} ms, during which arithmetic waits for {1e3 * (end_s - busy_s):.1f} ms.")
    put_in_words(fig, " ".join(told))
    return fig, ax


def _draw_span(ax: Axes, row: int, span: Span, color: str) -> None:
    width_ms, left_ms = 1e3 * (span.end_s - span.start_s), 1e3 * span.start_s
    ax.barh(row, width_ms, left=left_ms, height=height_of(span.op, 0.7), color=color, edgecolor="white", linewidth=0.5)
    middle_ms = left_ms + width_ms / 2
    ax.text(middle_ms, row, str(span.unit), ha="center", va="center_baseline", color="white")
