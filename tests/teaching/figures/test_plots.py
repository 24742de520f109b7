"""Every figure draws small records, returns `fig, ax`, says the unit of what it draws, and is described in words."""

import html
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from runs import tiny_record

from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, OffloadCopy
from fsdp_helpers.planning.walk.fsdp2 import REDUCE
from fsdp_helpers.planning.walk.ledger import Peak, Term
from fsdp_helpers.planning.walk.units import COPY_OF_GLOO
from fsdp_helpers.records import (
    Collective,
    ComparisonRow,
    LeverResult,
    MemoryCurve,
    Phase,
    RankRecord,
    RunRecord,
    StepTrace,
)
from fsdp_helpers.teaching.figures import plots
from fsdp_helpers.teaching.figures.bars import peak_parts
from fsdp_helpers.teaching.figures.descriptions import MOST_CHARACTERS, describe
from fsdp_helpers.teaching.figures.style import (
    OP_COLORS,
)

MB = 10**6
COUNTS = ("step", "rank")  # what is counted has no unit


def rank_record(num_units: int = 1, peak_bytes: int = 40 * MB) -> RankRecord:
    state = {"parameter_bytes": 4 * MB, "gradient_bytes": 4 * MB, "optimizer_bytes": 8 * MB}
    return RankRecord(rank=0, **state, held_bytes=17 * MB, peak_bytes=peak_bytes, num_units=num_units, collectives=())


def run_of(*ranks: RankRecord) -> RunRecord:
    return replace(tiny_record(), world_size=len(ranks), ranks=ranks)


def peak_of(**sizes: int) -> Peak:
    """A predicted peak of 8 MB in shards of parameters and gradients, and of `sizes` in MB, by kind."""
    shards = [Term(kind=kind, name="shards", values=MB, ranks=1) for kind in ("parameters", "gradients")]
    others = [Term(kind=kind, name="whole", values=size * MB, value_bytes=1) for kind, size in sizes.items()]
    return Peak(when="backward", terms=(*shards, *others))


def step_trace(*phases: str) -> StepTrace:
    stretches = tuple(Phase(name=name, start_s=0.1 * i, end_s=0.1 * (i + 1)) for i, name in enumerate(phases))
    curve = MemoryCurve(times_s=(0.0, 0.1, 0.2), allocated_bytes=(16 * MB, 40 * MB, 16 * MB), phases=stretches)
    ops = ("all_gather", "reduce_scatter", "all_to_all")
    seen = tuple(
        Collective(op=op, bytes=4 * MB, sent_bytes=2 * MB, start_s=0.1 * i, end_s=0.1 * i + 0.05)
        for i, op in enumerate(ops)
    )
    return StepTrace(curve=curve, collectives=seen)


def row(model: str, strategy: str, api: str | None) -> ComparisonRow:
    sizes = {"held_bytes": 9 * MB, "peak_bytes": 20 * MB, "moved_bytes": 5 * MB, "sent_bytes": 4 * MB}
    return ComparisonRow(model=model, strategy=strategy, api=api, world_size=2, step_s=0.01, final_loss=2.0, **sizes)


def rung(name: str, peak_bytes: int) -> LeverResult:
    return LeverResult(
        name=name, strategy="ddp", predicted_bytes=39 * MB, peak_bytes=peak_bytes, held_bytes=9 * MB, step_s=0.01
    )


PHASES = ("forward", "backward", "step")
RUNGS = [rung("DDP", 40 * MB), rung("+ a lever", 30 * MB), rung("+ another", 32 * MB)]
IMAGES, LABELS = torch.zeros(3, 1, 28, 28), torch.tensor([1, 2, 3])
ROWS = [row("shallow", "ddp", None), row("shallow", "fsdp", "fsdp1"), row("deep", "ddp", None)]
COPY = OffloadCopy(name="blocks.0.weight", way=TO_DEVICE, bytes=4 * MB, start_s=0.05, was_made=True)
FIGURES = {
    "plot_step_losses": ({"ddp": [2.3, 2.0, 1.8], "fsdp": [2.3, 2.0, 1.8]},),
    "plot_digits": (IMAGES, LABELS, torch.tensor([1, 7, 3])),
    "plot_memory_curve": (step_trace(*PHASES).curve, "One step"),
    "plot_held_and_peak": (
        {"ddp": run_of(rank_record(), rank_record()), "fsdp": run_of(rank_record(peak_bytes=30 * MB))},
        {"ddp": peak_of(optimizer=16, buffers=16), "fsdp": peak_of(optimizer=8, gathered=4, activations=10)},
    ),
    "plot_collectives": ([step_trace(*PHASES)] * 2, "One step"),
    "plot_step": ([step_trace(*PHASES)] * 2, "One step"),
    "plot_peak_by_ranks": ({"ddp": {1: 30 * MB, 2: 25 * MB}, "ddp, lean": {1: 30 * MB, 2: 20 * MB}}, 2 * MB),
    "plot_ladder": (RUNGS,),
    "plot_comparison": (ROWS,),
    "plot_copies": (step_trace(*PHASES), [COPY], ["blocks.0"]),
}


def drawn(fig: Figure) -> list[Axes]:
    fig.canvas.draw()  # labels that do not fit, glyphs that are missing: this is where they are noticed
    return fig.axes


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_has_room_for_its_label_and_a_unit(name):
    fig, axes = getattr(plots, name)(*FIGURES[name])
    assert list(np.ravel(axes)) == drawn(fig)
    for label in [label for ax in fig.axes for label in (ax.get_xlabel(), ax.get_ylabel()) if label]:
        assert re.search(r"\(.+\)", label) or label.startswith(COUNTS), label


def texts(ax: Axes) -> list[str]:
    return [text.get_text().strip() for text in ax.texts]


def test_bars_are_as_long_as_the_bytes():
    peak = peak_of(optimizer=8, gathered=4, gradients=6, activations=10)
    ax = plots.plot_held_and_peak({"fsdp": run_of(rank_record(), rank_record())}, {"fsdp": peak})[1]
    # Between steps: 4 + 4 + 8 MB are kept; 17 MB are held, so 1 MB is buffers.
    # At the peak: 4 + 4 MB of shards, 6 MB of full gradients, 8 of moments, 4 gathered, 10 of activations: 36 MB.
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [
        *((0, 4), (4, 4), (8, 8), (16, 1)),
        *((0, 4), (4, 4), (8, 8), (16, 6), (22, 4), (26, 10)),
    ]
    assert [bar.get_hatch() for bar in ax.patches].index("////") == 7  # gradients that are not averaged yet


def test_gradients_have_one_color_in_either_api_and_gloos_copy_has_its_own():
    names = {"buffers": (f"{REDUCE}, fc1", f"{COPY_OF_GLOO}, fc1", "all-gather, fc1"), "gradients": ("flat, fc1",)}
    terms = [Term(kind=kind, name=name, values=MB, value_bytes=1) for kind, all_ in names.items() for name in all_]
    parts = peak_parts(Peak(when="backward", terms=tuple(terms)))
    assert {kind: size // MB for kind, size in parts.items() if size} == {
        "full gradients": 2,
        "communication buffers": 1,
        "gloo's copy (CPU only)": 1,
    }


def test_ranks_that_are_alike_share_a_row():
    alike = run_of(rank_record(), replace(rank_record(peak_bytes=40 * MB + 16), rank=1))  # padding: 16 bytes
    differ = run_of(rank_record(), replace(rank_record(peak_bytes=39 * MB), rank=1))
    peaks = dict.fromkeys(("one", "two", "three"), peak_of(activations=32))
    ax = plots.plot_held_and_peak({"one": run_of(rank_record()), "two": alike, "three": differ}, peaks)[1]
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["one", "two,\neach of 2 ranks", "three, rank 0", "three, rank 1"]


def test_copies_are_marked_when_they_begin():
    back = replace(COPY, way=TO_HOST, start_s=0.25)
    trace = replace(step_trace(*PHASES), began_s=0.02)
    ax = plots.plot_copies(trace, [COPY, back], ["blocks.0"])[1]
    # 50 - 20 ms to the device, on the second line; 250 - 20 ms to the host, on the third
    marks = [(line.get_xdata()[0], line.get_ydata()[0], line.get_marker()) for line in ax.lines]
    assert marks == [(pytest.approx(30), 1, "v"), (pytest.approx(230), 2, "^")]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["collectives", TO_DEVICE, TO_HOST]
    assert texts(ax)[-2:] == ["0", "0"]


def test_bars_of_collectives_say_what_the_rank_sends():
    ax = plots.plot_collectives([step_trace(*PHASES)], "One step")[1]
    # Each has a full tensor of 4 MB, of which the rank sends 2
    assert sorted(texts(ax)) == ["2.0", "2.0", "2.0", *sorted(PHASES)]


def test_traffic_and_memory_lie_on_one_time_line():
    traffic, memory = plots.plot_step([step_trace(*PHASES)] * 2, "One step")[1]
    assert traffic.get_shared_x_axes().joined(traffic, memory)
    # A step of 300 ms; at 0.1 s, or 100 ms, memory rises to 40 MB and the reduce-scatter begins
    assert memory.get_xlim() == pytest.approx((0, 300))
    assert list(memory.lines[0].get_xdata()) == pytest.approx([0, 100, 200, 300])
    reduces = [bar for bar in traffic.patches if to_hex(bar.get_facecolor()) == OP_COLORS["reduce_scatter"]]
    assert [bar.get_x() for bar in reduces] == [100, 100]


def test_a_rung_says_its_peak_and_the_change():
    memory_ax, time_ax = plots.plot_ladder(RUNGS)[1]
    # 9 MB held of each, then the peaks; each step takes 10 ms
    assert texts(memory_ax) == ["9.0", "9.0", "9.0", "40.0", "30.0 (-10.0)", "32.0 (+2.0)"]
    assert texts(time_ax) == ["10", "10", "10"]
    assert [bar.get_width() for bar in memory_ax.patches] == [40, 30, 32, 9, 9, 9]
    assert [line.get_xdata()[0] for line in memory_ax.lines] == [39, 39, 39]  # the predictions
    assert [bar.get_width() for bar in time_ax.patches] == [10, 10, 10]


def title_of(name: str, *arguments: object) -> list[str]:
    fig = getattr(plots, name)(*(arguments or FIGURES[name]))[0]
    return [title for ax in fig.axes if (title := ax.get_title("left"))]


def test_a_title_states_what_was_found_or_there_is_none():
    same = {"one": [2.3, 2.0], "two": [2.3, 2.0 + 6e-8]}
    assert title_of("plot_step_losses", same) == ["Same losses: they differ by at most 6e-8"]
    for runs in ({"one": [2.3, 2.0], "two": [2.3, 1.9]}, {"one": [2.3, 2.0], "two": [2.3]}, {"one": [2.3]}):
        assert title_of("plot_step_losses", runs) == []
    assert title_of("plot_step_losses", {"one": [2.3], "two": [2.3]}) == ["Same losses, bitwise equal"]


@pytest.mark.parametrize(
    "name, found",
    [
        # 40 of 16 MB, from 0.1 s on, where backward begins
        ("plot_memory_curve", ["The peak comes in backward, 2.5 times what is held between steps\nOne step"]),
        # Each rank sends 2 MB for each of three collectives
        ("plot_collectives", ["In 3 collectives, each rank sends 6.00 MB\nOne step"]),
        ("plot_held_and_peak", ["fsdp: 100% of what ddp holds, 75% of its peak"]),
        ("plot_ladder", ["The lowest peak is 30.0 MB, 75% of DDP's 40.0"]),
        (
            "plot_comparison",
            [
                "shallow: ddp and fsdp (fsdp1) have the lowest peak",
                "deep: ddp has the lowest peak",
            ],
        ),
        ("plot_copies", ["Copies of units: 1 to the device, 0 to the host"]),
        # 20 MB for two million parameters, and 20 of 25 MB
        ("plot_peak_by_ranks", ["Lowest on 2 ranks: ddp, lean, 10.0 bytes per parameter, 80% of ddp's"]),
    ],
)
def test_titles_are_computed_from_what_is_drawn(name, found):
    assert title_of(name) == found


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_figures_that_are_shown_have_both(shell):
    fig, _ = plots.plot_held_and_peak(*FIGURES["plot_held_and_peak"])
    with capture_output() as captured:
        assert shell.display_formatter.format(fig) == ({}, {})  # it has displayed itself
    picture, folded = captured.outputs
    assert picture.metadata["image/png"]["alt"] == picture.data["text/plain"] == describe(fig)
    assert html.unescape(re.sub(r"<.*?>", "", folded.data["text/html"])) == f"In words{describe(fig)}"


def test_the_planned_band_contains_the_arithmetic_as_well_as_the_bytes():
    rates = [
        {"bits_per_s": None, "step_s": 0.024, "sent_bytes": 4_800_000},
        {"bits_per_s": 1e9, "step_s": 0.060, "sent_bytes": 4_800_000},  # the bytes alone: 38 ms
        {"bits_per_s": 5e7, "step_s": 0.800, "sent_bytes": 4_800_000},
    ]
    fig, ax = plots.plot_step_times(rates)
    band = ax.collections[0].get_paths()[0].vertices
    at_the_right = band[band[:, 0] > 999.9, 1]
    assert min(at_the_right) == pytest.approx(38.4) and 60 < max(at_the_right)
    assert "measured: 60 at 1,000, 800 at 50." in describe(fig)
    assert ax.get_title("left").startswith("At 50 Mbit/s, a step takes 33 times as long")


# ---------------------------------------------------------------- in words


SAID = {
    "plot_step_losses": ["loss over the global batch (nats) against step", "ddp: 2.3 at 1, 2 at 2, 1.8 at 3."],
    "plot_digits": ["7 ≠ 2"],
    "plot_memory_curve": ["The peak comes in backward", "16 at 0, 40 at 100, 16 at 200, 16 at 300."],
    "plot_held_and_peak": ["held, parameters 4", "at the peak, unsharded units 4", "peak 30.0"],
    "plot_collectives": ["In 3 collectives, each rank sends 6.00 MB", "rank 1: forward 100", "all_to_all 50"],
    "plot_step": ["In 3 collectives", "reduce_scatter 50", "40 at 100"],
    "plot_peak_by_ranks": ["ddp, lean: 15 at 1, 10 at 2."],
    "plot_ladder": ["+ a lever: peak 30, held 9", "predicted: at 39. predicted: at 39."],
    "plot_comparison": ["fsdp (fsdp1): peak 20, held 9", "fsdp (fsdp1): 10"],
    "plot_copies": ["In this order to the device: 0; to the host: ."],
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_described_with_its_numbers(name):
    text = describe(getattr(plots, name)(*FIGURES[name])[0])
    assert all(part in text for part in SAID[name]), text
    assert len(text) <= MOST_CHARACTERS and "\n" not in text and "_child" not in text
