"""Every figure draws the numbers that it is given, with a unit at each axis, and says them in words."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from runs import tiny_record

from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, OffloadCopy
from fsdp_helpers.measuring.prediction_errors import ErrorRow
from fsdp_helpers.planning.dimensions import pipeline_spans
from fsdp_helpers.planning.models import named_subject
from fsdp_helpers.planning.plan import CATEGORIES, Cluster, Settings, make_plan
from fsdp_helpers.planning.streams import step_spans
from fsdp_helpers.planning.walk.fsdp2 import REDUCE
from fsdp_helpers.planning.walk.ledger import Peak, Term
from fsdp_helpers.planning.walk.units import COPY_OF_GLOO
from fsdp_helpers.records import (
    Collective,
    LeverResult,
    MemoryCurve,
    Phase,
    RankRecord,
    RunRecord,
    StepTrace,
)
from fsdp_helpers.teaching.figures import dimension_plots, drawings, plans, plots, titles
from fsdp_helpers.teaching.figures.descriptions import MOST_CHARACTERS, describe
from fsdp_helpers.teaching.figures.style import OP_COLORS, PEAK_COLORS, STATE_COLORS

MB = 10**6
COUNTED = ("step", "rank")  # what is counted has no unit, and neither has an order, along an arrow


def rank_record(**sizes: int) -> RankRecord:
    state = {"parameter_bytes": 4 * MB, "gradient_bytes": 4 * MB, "optimizer_bytes": 8 * MB, "held_bytes": 17 * MB}
    return RankRecord(**{"rank": 0, "peak_bytes": 40 * MB, "num_units": 1, "collectives": ()} | state | sizes)


def run_of(*ranks: RankRecord) -> RunRecord:
    return replace(tiny_record(), world_size=len(ranks), ranks=ranks)


def peak_of(**sizes: int) -> Peak:
    """A predicted peak of 8 MB in shards of parameters and gradients, and of `sizes` in MB, by kind."""
    shards = [Term(kind=kind, name="shards", values=MB, ranks=1) for kind in ("parameters", "gradients")]
    others = [Term(kind=kind, name="whole", values=size * MB, value_bytes=1) for kind, size in sizes.items()]
    return Peak(when="backward", terms=(*shards, *others))


def peak_in_buffers() -> Peak:
    """A MB for each name: FSDP2's input to the reduce-scatter are gradients, and gloo's copy has a color of its own."""
    names = [f"{REDUCE}, fc1", f"{COPY_OF_GLOO}, fc1", "all-gather, fc1"]
    return Peak(
        when="backward", terms=tuple(Term(kind="buffers", name=name, values=MB, value_bytes=1) for name in names)
    )


def step_trace() -> StepTrace:
    """A step of 300 ms, with a peak of 40 MB from 100 ms on, and a collective of 50 ms in each phase."""
    names, ops = ("forward", "backward", "step"), ("all_gather", "reduce_scatter", "all_to_all")
    phases = tuple(Phase(name=name, start_s=0.1 * i, end_s=0.1 * (i + 1)) for i, name in enumerate(names))
    curve = MemoryCurve(times_s=(0.0, 0.1, 0.2), allocated_bytes=(16 * MB, 40 * MB, 16 * MB), phases=phases)
    seen = tuple(
        Collective(op=op, bytes=4 * MB, sent_bytes=2 * MB, start_s=0.1 * i, end_s=0.1 * i + 0.05)
        for i, op in enumerate(ops)
    )
    return StepTrace(curve=curve, collectives=seen)


def rung(name: str, peak_bytes: int) -> LeverResult:
    sizes = {"predicted_bytes": 39 * MB, "peak_bytes": peak_bytes, "held_bytes": 9 * MB}
    return LeverResult(name=name, strategy="ddp", step_s=0.01, **sizes)


def error_row(variant: str, real: bool, predicted_bytes: int) -> ErrorRow:
    sizes = dict.fromkeys(("predicted_state_bytes", "state_bytes", "predicted_sent_bytes", "sent_bytes"), 5)
    sizes |= {"predicted_bytes": predicted_bytes, "peak_bytes": 100}
    return ErrorRow(model="m", variant=variant, world_size=2, real=real, when="", **sizes)


def planned(*ranks: int, memory: float) -> list:
    clusters = [Cluster(world_size=number, device_memory_bytes=memory) for number in ranks]
    return [make_plan(named_subject("vit-b16"), Settings(batch=8), cluster) for cluster in clusters]


class Case(NamedTuple):
    """A figure, what its description says, and what its first panel has: left end and length of bars, and texts."""

    draw: Callable
    arguments: tuple
    said: tuple[str, ...]
    bars: list | None = None
    texts: list | None = None


LOST = MemoryCurve(times_s=(), allocated_bytes=())
MET = Collective(op="all_reduce", bytes=4 * MB, sent_bytes=4 * MB, start_s=0.0, end_s=0.05, unit="blocks.0")
LATE_FOR = StepTrace(curve=LOST, collectives=(MET, replace(MET, start_s=0.1, end_s=float("inf"))))
LATE = StepTrace(curve=LOST, collectives=(replace(MET, start_s=0.02, shapes="[2]"),))
TRACE, PLANS = step_trace(), planned(8, 64, 1024, memory=10e9)
COPY = OffloadCopy(name="blocks.0.weight", way=TO_DEVICE, bytes=4 * MB, start_s=0.05, was_made=True)
TWO_RUNS = {"ddp": run_of(rank_record(), rank_record()), "fsdp": run_of(rank_record(peak_bytes=30 * MB))}
ALIKE = run_of(rank_record(), rank_record(rank=1, peak_bytes=40 * MB + 16))  # padding: 16 bytes
DIFFERENT = run_of(rank_record(), rank_record(rank=1, peak_bytes=39 * MB))
PHASES = [(0, 100), (100, 100), (200, 100)]
MESH = {"data": ["first half", "second half"], "tensor": ["head 0", "head 1"]}
ORDER = ["F0", "F1", "B0", "B1"]
CASES = {
    "distances": Case(plots.plot_distances, ({"resumed": [0.5, 0.25]}, 7), ("resumed: 0.5 at 7, 0.25 at 8.",)),
    "digits": Case(
        plots.plot_digits,
        (torch.zeros(3, 1, 28, 28), torch.tensor([1, 2, 3]), torch.tensor([1, 7, 3])),
        ("7 ≠ 2",),
    ),
    "memory": Case(
        plots.plot_trace,
        ([replace(TRACE, collectives=())], "One step"),
        (
            "The peak comes in backward, 2.5 times what is held between steps; One step",
            "rank 0: peak 40.0 MB: 16 at 0, 40 at 100, 16 at 200, 16 at 300.",
        ),
    ),
    "held and peak": Case(
        plots.plot_held_and_peak,
        (
            TWO_RUNS,
            {"ddp": peak_of(optimizer=16, buffers=16), "fsdp": peak_of(optimizer=8, gathered=4, activations=10)},
        ),
        ("fsdp: 100% of what ddp holds, 75% of its peak", "held, parameters 4", "unsharded units 4", "peak 30.0"),
    ),
    "one run's bars": Case(
        plots.plot_held_and_peak,
        ({"fsdp": ALIKE}, {"fsdp": peak_of(optimizer=8, gathered=4, gradients=6, activations=10)}),
        ("at the peak, full gradients 6",),
        # Between steps: 4 + 4 + 8 MB are kept; 17 MB are held, so 1 MB is buffers.
        # At the peak: 4 + 4 MB of shards, 6 MB of full gradients, 8 of moments, 4 gathered, 10 of activations: 36 MB.
        bars=[*((0, 4), (4, 4), (8, 8), (16, 1)), *((0, 4), (4, 4), (8, 8), (16, 6), (22, 4), (26, 10))],
    ),
    "rows of ranks": Case(
        plots.plot_held_and_peak,
        (
            {"one": run_of(rank_record()), "two": ALIKE, "three": DIFFERENT},
            dict.fromkeys(("one", "two", "three"), peak_of()),
        ),
        ("one: held", "two, each of 2 ranks: held", "three, rank 0: held", "three, rank 1: held"),
    ),
    "buffers": Case(
        plots.plot_held_and_peak,
        ({"fsdp": ALIKE}, {"fsdp": peak_in_buffers()}),
        ("peak, full gradients 1", "peak, communication buffers 1", "peak, gloo's copy (CPU only) 1"),
    ),
    "collectives": Case(
        plots.plot_trace,
        ([TRACE] * 2, "One step"),
        ("In 3 collectives, each rank sends 6.00 MB; One step", "reduce-scatter 50", "all-to-all 50", "40 at 100"),
        bars=[*PHASES, *[(0, 50), (100, 50), (200, 50)] * 2],
        texts=["2.00 MB"] * 6,  # of a full tensor of 4 MB, the rank sends 2
    ),
    "who waits": Case(
        plots.plot_trace,
        ({0: LATE_FOR, 1: LATE},),
        ("Collectives begun: 2 on rank 0, 1 on rank 1; number 2 on rank 0 never ended", "waiting 20", "never ended 15"),
        bars=[(0, 20), (20, 30), (100, 15), (115, 0.46), (20, 30)],
        texts=["4.00 MB", "≠"] * 2,
    ),
    "steps": Case(
        plots.plot_trace,
        ([StepTrace(curve=MemoryCurve(times_s=(0.0, 0.2), allocated_bytes=(80, 60)), collectives=(), steps_s=(0.1,))],),
        ("allocated (kB)", "rank 0: peak 80 B", "Labels: step 1"),
    ),
    "peak by ranks": Case(
        plots.plot_peak_by_ranks,
        (
            {"DDP": {1: 30 * MB, 2: 25 * MB}, "FSDP2, one unit": {1: 30 * MB, 2: 20 * MB}},
            2 * MB,
            {"DDP": "ddp", "FSDP2, one unit": "fsdp"},
        ),
        (
            "On 2 ranks, FSDP2 with one unit peaks at 10.0 bytes per parameter, 80% of DDP's",
            "FSDP2, one unit: 15 at 1, 10 at 2.",
        ),
    ),
    "ladder": Case(
        plots.plot_ladder,
        ([rung("DDP", 40 * MB), rung("+ a lever", 30 * MB), rung("+ another", 32 * MB)],),
        ("The lowest peak is 30.0 MB, 75% of DDP's 40.0", "+ a lever: peak 30, held 9", "predicted: at 39.", "DDP: 10"),
        texts=["9.0", "9.0", "9.0", "40.0", "30.0 (-10.0)", "32.0 (+2.0)"],
    ),
    "copies": Case(
        plots.plot_copies,
        (TRACE, [COPY, replace(COPY, way=TO_HOST, start_s=0.25)], ["blocks.0"]),
        ("Copies of units: 1 to the device, 1 to the host. In this order to the device: 0; to the host: 0.",),
        texts=["forward", "backward", "step", *["2.00 MB"] * 3, "0", "0"],
    ),
    "waterfall": Case(
        plans.plot_waterfall,
        (PLANS, "title"),
        (
            "Figure: Fits 10 GB on 8 ranks or more; title;",
            f"64: parameters {PLANS[1].by_category()['parameters'] / 1e9:,.4g}, ",
            "10 GB: 10 throughout.",
        ),
        texts=[f"{plan.needed_bytes / 1e9:,.0f}" for plan in PLANS],
    ),
    "what fits": Case(
        plans.plot_what_fits,
        (
            {"one": {8: 30e9, 64: 9e9}, "two": {8: 90e9, 64: 20e9}},
            {"one": {24: 12, 40: 4}, "two": {24: 50, 40: None}},  # 4 ranks are fewer than those drawn
        ),
        ("one: 30 at 8, 9 at 64.", "one fits: 24 at 12.", "two fits: 24 at 50."),
    ),
    "errors": Case(
        plans.plot_errors,
        ([error_row("DDP", True, 101), error_row("DDP", False, 99), error_row("bf16", True, 100)],),
        (
            "3 of 3 peaks within 1%; the worst is 1.0% off",
            "m, real ranks: 1 at 0, 0 at 1. m, one rank of N: -1 at 0.08.",
        ),
    ),
    "stages": Case(
        drawings.draw_step,
        ("FSDP",),
        (
            "Stage 2, forward: parameters in full on every rank, gradients none, optimizer a shard on each rank. "
            "Next: backward. Stage 3, end of backward: parameters in full on every rank, gradients in full on every "
            "rank (from its own images only), optimizer a shard on each rank. Next: reduce-scatter.",
        ),
    ),
    "units": Case(
        drawings.draw_units,
        (["net", "first", "second"],),
        ("The root, net, stays unsharded from its first all-gather", "Unsharded one unit early in backward: first."),
        # Forward ends at 2.25; backward is in the second unit until 3.25, in the first until 4.25. A row has its
        # parameters, the second time early, then its gradients.
        bars=[(0, 4.75), (2.25, 2.5), (0, 1), (2.25, 2), (3.25, 1), (1, 1), (2.25, 1), (2.25, 1)],
    ),
    "streams": Case(
        drawings.draw_streams,
        ({"early": step_spans(2, forward_s=2e-3, gather_s=1e-3, reduce_s=1e-3, prefetch=True)}, "2 ms of forward"),
        ("early: 14.0 ms, during which arithmetic waits for 2.0 ms.",),
        # Two forwards, after the first all-gather, and two backwards of twice the length; below them two all-gathers for
        # forward, two for backward, and both reduce-scatters.
        bars=[(1, 2), (3, 2), (5, 4), (9, 4), (0, 1), (1, 1), (3, 1), (5, 1), (9, 1), (13, 1)],
    ),
    "meshes": Case(
        dimension_plots.draw_meshes,
        ({("data", "tensor"): MESH, ("tensor", "data"): MESH},),
        (
            "data by tensor: along data the ranks have first half and second half, along tensor they have head 0 and head 1.",
        ),
        texts=[
            "rank 0\nfirst half\nhead 0",
            "rank 1\nfirst half\nhead 1",
            "rank 2\nsecond half\nhead 0",
            "rank 3\nsecond half\nhead 1",
        ],
    ),
    "pipeline": Case(
        dimension_plots.draw_pipeline,
        ({"GPipe": pipeline_spans([ORDER, ORDER])},),
        ("GPipe, 33% bubble. Stage 0: F0 F1 B0 B1. Stage 1: F0 F1 B0 B1.",),  # 1 / (2 + 1)
        texts=ORDER * 2,
    ),
    "sent": Case(
        dimension_plots.draw_sent,
        ({"FSDP": {"all_gather": 2 * MB, "reduce_scatter": MB}, "experts": {"all_to_all": MB // 2}},),
        ("FSDP: all-gather 2.0 MB, reduce-scatter 1.0 MB. experts: all-to-all 0.5 MB.",),
        bars=[(0, 2), (2, 1), (0, 0.5)],
        texts=["3.0", "0.5"],
    ),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_figure(case):
    fig, axes = case.draw(*case.arguments)
    fig.canvas.draw()  # labels that do not fit, glyphs that are missing: this is where they are noticed
    assert list(np.ravel(axes)) == fig.axes
    for label in [label for ax in fig.axes for label in (ax.get_xlabel(), ax.get_ylabel()) if label]:
        assert re.search(r"\(.+\)|[→←]", label) or label.startswith(COUNTED), label
    words = describe(fig)
    assert [part for part in case.said if part not in words] == [], words
    assert len(words) <= MOST_CHARACTERS and "\n" not in words and "_child" not in words
    if case.bars:
        ends = [(bar.get_x(), bar.get_width()) for bar in fig.axes[0].patches]
        assert ends == [pytest.approx(pair) for pair in case.bars]
    if case.texts:
        assert [text.get_text().strip() for text in fig.axes[0].texts] == case.texts


def filled(ax: Axes, kind: str) -> int:
    """How many shards of one kind of state are filled in a drawing."""
    return sum(to_hex(box.get_facecolor()) == STATE_COLORS[kind] and box.get_fill() for box in ax.patches)


@pytest.mark.parametrize(
    "strategy, num_ranks, shards",
    [
        # Two ranks, two shards each: parameters are a shard, whole, whole, a shard
        ("FSDP", 2, {"parameters": 2 * (1 + 2 + 2 + 1), "gradients": 2 * (1 + 0 + 2 + 1), "optimizer": 2 * 4}),
        ("DDP", 3, {"parameters": 36, "gradients": 27, "optimizer": 36}),  # all, but for gradients in forward
    ],
)
def test_a_drawn_step_fills_what_each_rank_has(strategy, num_ranks, shards):
    ax = drawings.draw_step(strategy, num_ranks)[1]
    assert {kind: filled(ax, kind) for kind in shards} == shards


def test_a_bar_of_a_plan_has_the_color_of_its_category_in_every_figure():
    ax = plans.plot_waterfall(PLANS, "title")[1]
    drawn = [to_hex(bars[0].get_facecolor()) for bars in ax.containers[: len(CATEGORIES)]]
    assert drawn == [to_hex(PEAK_COLORS[category]) for category in CATEGORIES.values()]


def test_names_at_the_same_height_are_moved_apart_in_their_column():
    assert list(plots.apart([(1, 100, "a"), (2, 99, "b"), (2, 100, "c")])) == [
        (1, 100, "a"),
        (2, 99, "b"),
        (2, 106, "c"),
    ]


def test_a_title_says_no_more_than_the_numbers():
    assert titles.fits_from({8: 30e9, 16: 20e9, 1024: 9e9}, 10e9) == "Fits 10 GB on 1,024 ranks or more"
    assert titles.fits_from({8: 30e9}, 10e9) == "Doesn't fit 10 GB on 8 ranks"


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_a_notebook_shows_a_figure_with_its_description(shell):
    fig, _ = plots.plot_trace([TRACE], "One step")
    with capture_output() as captured:
        assert shell.display_formatter.format(fig) == ({}, {})  # it has displayed itself
    picture, folded = captured.outputs
    assert picture.metadata["image/png"]["alt"] == picture.data["text/plain"] == describe(fig)
    assert html.unescape(re.sub(r"<.*?>", "", folded.data["text/html"])) == f"In words{describe(fig)}"


def contrast(color: str, page: str) -> float:
    """The ratio of WCAG 2.2: 3 is enough for a bar, and 4.5 for text."""
    lights = []
    for rgb in map(to_rgb, (color, page)):
        red, green, blue = (value / 12.92 if value <= 0.04 else ((value + 0.055) / 1.055) ** 2.4 for value in rgb)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])  # JupyterLab's, light and dark
def test_bars_and_boxes_are_seen_on_both_pages(page):
    """A box that isn't opaque would take its page's color, but not its text's."""
    assert {op: color for op, color in OP_COLORS.items() if contrast(color, page) < 3} == {}
    held = {"data": ["a", "b"], "tensor": ["c", "d"]}
    _, (ax, _) = dimension_plots.draw_meshes({("data", "tensor"): held, ("tensor", "data"): held})
    for box, text in zip(ax.patches, ax.texts, strict=True):
        assert box.get_alpha() in (None, 1) and box.get_facecolor()[3] == 1
        assert contrast(text.get_color(), box.get_facecolor()[:3]) > 4.5
