"""Figures for notebook 15: ranks in two dimensions, a pipeline step, and the bytes that a rank sends."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsdp_helpers.planning.dimensions import PipelineWork, idle_share
from fsdp_helpers.quantities import MB, in_mb
from fsdp_helpers.teaching.figures.descriptions import put_in_words
from fsdp_helpers.teaching.figures.style import (
    OP_COLORS,
    figure_style,
    ink_on,
    swatches,
)
from fsdp_helpers.training.palette import FRAME_COLOR, TEXT_COLOR

BOX_COLOR = "#e5e7eb"  # opaque, so that its text is as readable on a black page
WORK_COLORS = {"F": FRAME_COLOR, "B": TEXT_COLOR}  # as in `draw_streams`


def draw_meshes(meshes: Mapping[tuple[str, str], Mapping[str, Sequence[str]]]) -> tuple[Figure, Sequence[Axes]]:
    """Draw one panel per mesh of 2 x 2 ranks, with two panels in each row. Each rank's box lists what the rank holds.

    `meshes` maps each pair of dimension names (rows first) to what ranks 0 and 1 hold along each of the two dimensions.
    It has an even number of pairs.
    """
    with figure_style():
        num_rows = len(meshes) // 2
        size = (8, 1.95 * num_rows)
        fig, axes = plt.subplots(num_rows, 2, figsize=size, layout="constrained", squeeze=False)
        for ax, ((rows, columns), has) in zip(axes.flat, meshes.items(), strict=True):
            for rank in range(4):
                row, column = divmod(rank, 2)
                lines = f"rank {rank}\n{has[rows][row]}\n{has[columns][column]}"
                ax.add_patch(plt.Rectangle((column, row), 0.94, 0.9, facecolor=BOX_COLOR))
                ax.text(column + 0.47, row + 0.45, lines, ha="center", va="center", color=ink_on(BOX_COLOR))
            ax.set_title(f"{rows} × {columns}")
            ax.set_xlabel(f"{columns} →")
            ax.set_ylabel(f"← {rows}")
            ax.set(xlim=(0, 2), ylim=(2, 0), xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
    told = [
        f"{rows} by {columns}: along {rows} the ranks have {' and '.join(has[rows])}, along {columns} they have "
        f"{' and '.join(has[columns])}."
        for (rows, columns), has in meshes.items()
    ]
    put_in_words(fig, " ".join(["Four ranks in two dimensions.", *told]).replace("\n", " "))
    return fig, list(axes.flat)


def draw_pipeline(schedules: Mapping[str, Sequence[Sequence[PipelineWork]]]) -> tuple[Figure, Sequence[Axes]]:
    """Draw a step of each schedule: one row per stage, one box per pass, numbered by micro-batch."""
    with figure_style():
        size = (8, 0.7 + 1.25 * len(schedules))
        fig, axes = plt.subplots(len(schedules), 1, figsize=size, layout="constrained", sharex=True, squeeze=False)
        told = []
        for ax, (name, stages) in zip(axes[:, 0], schedules.items(), strict=True):
            end, idle = max(work.end for stage in stages for work in stage), idle_share(stages)
            for row, stage in enumerate(stages):
                ax.barh(row, end, height=0.8, color="none", edgecolor=FRAME_COLOR, linewidth=0.8)
                for work in stage:
                    color = WORK_COLORS[work.kind]
                    ax.barh(row, work.end - work.start, left=work.start, height=0.8, color=color, edgecolor="white")
                    place = (work.start + work.end) / 2, row
                    ax.text(*place, f"{work.kind}{work.number}", ha="center", va="center", color=ink_on(color))
            ax.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
            ax.set(ylim=(len(stages) - 0.5, -0.5))
            ax.set_title(f"{name}: {idle:.0%} of the step is bubble (empty)")
            orders = [" ".join(f"{work.kind}{work.number}" for work in stage) for stage in stages]
            told += [f"{name}, {idle:.0%} bubble."] + [f"Stage {row}: {order}." for row, order in enumerate(orders)]
        axes[-1, 0].set_xlabel("time (a micro-batch's forward pass = 1; its backward pass takes twice that)")
    put_in_words(fig, " ".join(told))
    return fig, axes[:, 0]


def draw_sent(runs: Mapping[str, Mapping[str, int]]) -> tuple[Figure, Axes]:
    """Draw the bytes a rank sends in a step, one bar per run, stacked by collective."""
    ops = list(dict.fromkeys(op for sent in runs.values() for op in sent))
    names = {op: op.replace("_", "-") for op in ops}
    with figure_style():
        fig, ax = plt.subplots(figsize=(8, 0.9 + 0.4 * len(runs)), layout="constrained")
        for row, sent in enumerate(runs.values()):
            left = 0.0
            for op, sent_bytes in sent.items():
                ax.barh(row, sent_bytes / MB, left=left, height=0.62, color=OP_COLORS[op], linewidth=0)
                left += sent_bytes / MB
            ax.text(left, row, f" {in_mb(sum(sent.values()))}", va="center", color=TEXT_COLOR)
        ax.set_yticks(range(len(runs)), list(runs))
        ax.set(xlabel="what rank 0 sends in a step (MB)", ylim=(len(runs) - 0.5, -0.5))
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        ax.legend(handles=swatches({names[op]: OP_COLORS[op] for op in ops}), ncols=len(ops), **place)
    told = [
        f"{name}: {', '.join(f'{names[op]} {in_mb(size)} MB' for op, size in sent.items())}."
        for name, sent in runs.items()
    ]
    put_in_words(fig, " ".join(["Bytes that rank 0 sends in a step.", *told]))
    return fig, ax
