"""Every figure draws small records, returns `fig, ax`, says the unit of what it draws, and is described in words."""

import base64
import html
import inspect
import io
import re
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from runs import tiny_record

from fsdp_helpers.measuring.copies import TO_DEVICE, TO_HOST, OffloadCopy
from fsdp_helpers.planning.walk.fsdp2 import REDUCE
from fsdp_helpers.planning.walk.ledger import Peak, Term
from fsdp_helpers.planning.walk.units import COPY_OF_GLOO
from fsdp_helpers.records import (
    Collective,
    ComparisonRow,
    MemoryCurve,
    Phase,
    RankRecord,
    Rung,
    RunRecord,
    StepTrace,
)
from fsdp_helpers.teaching.figures import plots
from fsdp_helpers.teaching.figures.bars import peak_parts
from fsdp_helpers.teaching.figures.descriptions import MOST_CHARACTERS, describe
from fsdp_helpers.teaching.figures.style import (
    OP_COLORS,
    PEAK_COLORS,
    SERIES_COLORS,
    STRATEGY_COLORS,
    described_png,
)
from fsdp_helpers.training.palette import TEXT_COLOR

MB = 10**6
COUNTS = ("epoch", "step", "rank", "FSDP units")  # what is counted has no unit


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


def rung(name: str, peak_bytes: int) -> Rung:
    return Rung(
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


@pytest.fixture(autouse=True)
def no_window():
    plt.switch_backend("agg")
    yield
    plt.close("all")


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


def test_every_figure_is_in_the_table():
    names = {name for name, value in vars(plots).items() if name.startswith("plot_") and inspect.isfunction(value)}
    assert names == set(FIGURES)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("plot_digits", (IMAGES[:1], LABELS[:1])),
        ("plot_collectives", ([step_trace()], "a step without phases")),
        ("plot_step", ([step_trace()], "a step without phases")),
        ("plot_memory_curve", (step_trace().curve, "a step without phases")),
        ("plot_ladder", (RUNGS[:1],)),
        ("plot_comparison", (ROWS[:1],)),
    ],
)
def test_one_of_a_kind(name, arguments):
    fig, axes = getattr(plots, name)(*arguments)
    assert list(np.ravel(axes)) == drawn(fig)


def test_bars_are_as_long_as_the_bytes():
    peak = peak_of(optimizer=8, gathered=4, gradients=6, activations=10)
    ax = plots.plot_held_and_peak({"fsdp": run_of(rank_record())}, {"fsdp": peak})[1]
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


def test_parts_have_their_numbers_and_bars_their_sums():
    ax = plots.plot_held_and_peak(*FIGURES["plot_held_and_peak"])[1]
    # Of 40 MB, 7 % are 2.8: every part but the 1 MB of buffers between steps has room for its number
    ddp = ["4.0", "4.0", "8.0", "4.0", "4.0", "16.0", "16.0", "held 17.0", "peak 40.0"]
    fsdp = ["4.0", "4.0", "8.0", "4.0", "4.0", "8.0", "4.0", "10.0", "held 17.0", "peak 30.0"]
    assert texts(ax) == ddp + fsdp


def test_a_line_stands_at_the_measured_peak():
    ax = plots.plot_held_and_peak(*FIGURES["plot_held_and_peak"])[1]
    assert [list(line.get_xdata()) for line in ax.lines] == [[40, 40], [30, 30]]


def test_ranks_that_are_alike_share_a_row():
    alike = run_of(rank_record(), replace(rank_record(peak_bytes=40 * MB + 16), rank=1))  # padding: 16 bytes
    differ = run_of(rank_record(), replace(rank_record(peak_bytes=39 * MB), rank=1))
    peaks = dict.fromkeys(("one", "two", "three"), peak_of(activations=32))
    ax = plots.plot_held_and_peak({"one": run_of(rank_record()), "two": alike, "three": differ}, peaks)[1]
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["one", "two,\neach of 2 ranks", "three, rank 0", "three, rank 1"]


def test_a_variant_of_a_strategy_has_its_color_and_a_broken_line():
    ax = plots.plot_peak_by_ranks(*FIGURES["plot_peak_by_ranks"])[1]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines] == [
        ([1, 2], [15, 12.5]),  # 30 MB for two million parameters: 15 bytes each
        ([1, 2], [15, 10]),
    ]
    assert {line.get_color() for line in ax.lines} == {STRATEGY_COLORS["ddp"]}
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"]


def test_names_at_the_ends_of_lines_do_not_cover_each_other():
    # Of 100, a line of text takes 7: the name at 53 moves up to 57; the one at 10 is alone in its column
    assert list(plots.apart([(4, 50, "a"), (4, 53, "b"), (4, 100, "c"), (1, 10, "d")])) == [
        (1, 10, "d"),
        (4, 50, "a"),
        (4, pytest.approx(57), "b"),
        (4, 100, "c"),
    ]


def test_copies_are_marked_when_they_begin():
    back = replace(COPY, way=TO_HOST, start_s=0.25)
    trace = replace(step_trace(*PHASES), began_s=0.02)
    ax = plots.plot_copies(trace, [COPY, back], ["blocks.0"])[1]
    # 50 - 20 ms to the device, on the second line; 250 - 20 ms to the host, on the third
    marks = [(line.get_xdata()[0], line.get_ydata()[0], line.get_marker()) for line in ax.lines]
    assert marks == [(pytest.approx(30), 1, "v"), (pytest.approx(230), 2, "^")]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["collectives", TO_DEVICE, TO_HOST]
    assert texts(ax)[-2:] == ["0", "0"]


def texts(ax: Axes) -> list[str]:
    return [text.get_text().strip() for text in ax.texts]


def test_bars_of_collectives_say_what_the_rank_sends():
    ax = plots.plot_collectives([step_trace(*PHASES)], "One step")[1]
    # Each has a full tensor of 4 MB, of which the rank sends 2
    assert sorted(texts(ax)) == ["2.0", "2.0", "2.0", *sorted(PHASES)]


def test_bars_without_room_for_a_number_are_added_up():
    short = [
        Collective(op="all_gather", bytes=3 * MB, sent_bytes=sent, start_s=0.1 * i, end_s=0.1 * i + 0.001)
        for i, sent in enumerate((2 * MB, 3 * MB))
    ]
    trace = replace(step_trace(*PHASES), collectives=(*short, *step_trace().collectives[2:]))
    ax = plots.plot_collectives([trace, trace], "One step")[1]
    # Two bars of 1 ms in 300 send 2 + 3 MB; the third, of 50 ms, has its number
    for note in ("2.0", "2 narrow bars: 5.0"):
        assert texts(ax).count(note) == 2  # one for each rank


def test_collectives_differ_in_height_not_in_color_alone():
    ax = plots.plot_collectives([step_trace()], "One step")[1]
    gather, reduce, other = (bar.get_height() for bar in ax.patches)
    assert gather == other > 1.5 * reduce
    legend = ax.get_legend()
    assert [text.get_text() for text in legend.texts] == ["all_gather", "reduce_scatter", "all_to_all"]
    gather, reduce, other = (line.get_linewidth() for line in legend.get_lines())
    assert gather == other > 1.5 * reduce


HATCHED = {"plot_held_and_peak": PEAK_COLORS["full gradients"]}


@pytest.mark.parametrize("name", FIGURES)
def test_only_gradients_that_are_not_averaged_are_hatched(name):
    arguments = FIGURES[name]
    if name in HATCHED:
        arguments = ({"ddp": run_of(rank_record())}, {"ddp": peak_of(gradients=6)})
    fig = getattr(plots, name)(*arguments)[0]
    hatched = {to_hex(bar.get_facecolor()) for ax in fig.axes for bar in ax.patches if bar.get_hatch()}
    assert hatched == ({HATCHED[name]} if name in HATCHED else set())


def test_traffic_and_memory_lie_on_one_time_line():
    traffic, memory = plots.plot_step([step_trace(*PHASES)] * 2, "One step")[1]
    assert traffic.get_shared_x_axes().joined(traffic, memory)
    # A step of 300 ms; at 0.1 s, or 100 ms, memory rises to 40 MB and the reduce-scatter begins
    assert memory.get_xlim() == pytest.approx((0, 300))
    assert list(memory.lines[0].get_xdata()) == pytest.approx([0, 100, 200, 300])
    reduces = [bar for bar in traffic.patches if to_hex(bar.get_facecolor()) == OP_COLORS["reduce_scatter"]]
    assert [bar.get_x() for bar in reduces] == [100, 100]


def test_runs_that_coincide_can_all_be_seen():
    runs = {name: [2.3, 2.0] for name in ("one", "two", "three")}
    lines = plots.plot_step_losses(runs)[1].lines
    assert [line.get_linewidth() for line in lines] == [5.5, 3.5, 1.5]  # thin on thick ...
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-."]  # ... with gaps that show what lies below
    assert [line.get_alpha() for line in lines] == [0.6, 1, 1]
    assert [line.get_color() for line in lines] == list(SERIES_COLORS[:3])


def test_steps_are_whole_numbers():
    fig, ax = plots.plot_step_losses({"ddp": [2.0] * 20})
    fig.canvas.draw()
    assert all("." not in label.get_text() for label in ax.get_xticklabels())


def test_a_rung_says_its_peak_and_the_change():
    memory_ax, time_ax = plots.plot_ladder(RUNGS)[1]
    # 9 MB held of each, then the peaks; each step takes 10 ms
    assert texts(memory_ax) == ["9.0", "9.0", "9.0", "40.0", "30.0 (-10.0)", "32.0 (+2.0)"]
    assert texts(time_ax) == ["10", "10", "10"]
    assert [bar.get_width() for bar in memory_ax.patches] == [40, 30, 32, 9, 9, 9]
    assert [line.get_xdata()[0] for line in memory_ax.lines] == [39, 39, 39]  # the predictions
    assert [bar.get_width() for bar in time_ax.patches] == [10, 10, 10]


def test_a_memory_curve_in_megabytes_over_milliseconds():
    ax = plots.plot_memory_curve(step_trace(*PHASES).curve, "One step")[1]
    curve, peak = ax.lines
    # 16, 40 and 16 MB, from 0, 0.1 and 0.2 s on, to the end of the last phase
    assert list(curve.get_ydata()) == [16, 40, 16, 16]
    assert list(curve.get_xdata()) == pytest.approx([0, 100, 200, 300])
    assert list(peak.get_ydata()) == [40, 40]
    assert texts(ax)[-1] == "peak 40.0 MB"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time in the step (ms)", "allocated (MB)")


def test_notes_stand_above_the_curve_at_their_moments():
    trace = step_trace(*PHASES)
    ax = plots.plot_memory_curve(trace.curve, "One step", plots.moments_of_one_unit(trace))[1]
    # The gather ends at 50 ms, forward at 100, where the reduce-scatter begins, backward at 200; memory rises from 16 to
    # 40 MB and falls again
    lines = dict(zip(texts(ax)[-4:], ax.lines[2:], strict=True))
    moments = {text.split()[0]: (round(line.get_xdata()[0]), line.get_ydata()[0]) for text, line in lines.items()}
    assert moments == {
        "all-gather:": (50, 16),
        "forward": (100, 40),
        "backward": (100, 40),
        "reduced:": (200, 16),
    }
    # Each text begins at its line and lies lower than the one before, above the peak: no line crosses a text
    ends = sorted((line.get_xdata()[0], -line.get_ydata()[1]) for line in lines.values())
    heights = [-lower for _, lower in ends]
    assert heights == sorted(set(heights), reverse=True) and min(heights) > 40
    assert {text.get_ha() for text in ax.texts[-4:]} == {"left"}


def test_the_comparison_draws_held_in_front_of_peak():
    (memory_ax, time_ax), _ = plots.plot_comparison(ROWS)[1]
    # The two rows of "shallow": peak 20 MB in the light color, then held 9 MB in the solid one; 5 MB moved are no bar
    assert [(bar.get_width(), bar.get_alpha()) for bar in memory_ax.patches] == [(20, 0.35)] * 2 + [(9, None)] * 2
    assert [bar.get_width() for bar in time_ax.patches] == [10, 10]
    assert [tick.get_text() for tick in memory_ax.get_yticklabels()] == ["ddp", "fsdp (fsdp1)"]
    assert texts(memory_ax) == ["9.0", "9.0", "20.0", "20.0"] and texts(time_ax) == ["10", "10"]


def test_wrong_predictions_say_what_would_be_right():
    axes = plots.plot_digits(IMAGES, LABELS, torch.tensor([1, 7, 3]))[1]
    assert [ax.get_title() for ax in axes] == ["1", "7 ≠ 2", "3"]
    assert [ax.title.get_weight() for ax in axes] == ["normal", "bold", "normal"]


def test_figures_let_the_page_show_through_and_are_legible_on_white_and_on_black():
    with plt.style.context("dark_background"):
        fig, ax = plots.plot_memory_curve(step_trace().curve, "One step")
    assert fig.get_facecolor()[3] == ax.get_facecolor()[3] == 0
    assert ax.xaxis.label.get_color() == ax.title.get_color() == TEXT_COLOR
    picture, _ = described_png(fig)
    corner = plt.imread(io.BytesIO(base64.b64decode(picture)))[0, 0]
    assert corner[3] == 0
    # Contrast as in WCAG 2.2: (lighter + 0.05) / (darker + 0.05), in relative luminance
    gray = ((int(TEXT_COLOR[1:3], 16) / 255 + 0.055) / 1.055) ** 2.4
    assert 1.05 / (gray + 0.05) >= 4.5 and (gray + 0.05) / 0.05 >= 4.5


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
        ("plot_collectives", ["In 3 collectives each rank sends 6.00 MB\nOne step"]),
        ("plot_held_and_peak", ["fsdp: 100 % of what ddp holds, 75 % of its peak"]),
        ("plot_ladder", ["The lowest peak is 30.0 MB, 75 % of DDP's 40.0"]),
        (
            "plot_comparison",
            [
                "shallow: the lowest peak is that of ddp and fsdp (fsdp1)",
                "deep: the lowest peak is that of ddp",
            ],
        ),
        ("plot_copies", ["Copies of units: 1 to the device, 0 to the host"]),
        # 20 MB for two million parameters, and 20 of 25 MB
        ("plot_peak_by_ranks", ["Lowest on 2 ranks: ddp, lean, 10.0 bytes per parameter, 80 % of ddp's"]),
    ],
)
def test_titles_are_computed_from_what_is_drawn(name, found):
    assert title_of(name) == found


def test_a_step_says_what_is_sent_and_where_it_peaks():
    different = [step_trace(*PHASES), replace(step_trace(*PHASES), collectives=())]
    assert title_of("plot_step", different, "One step") == [
        "In 3 collectives rank 0 sends 6.00 MB; numbers are MB\nOne step",
        "The peak comes in backward, 2.5 times what is held between steps",
    ]


def test_the_lowest_peak_is_named_with_its_share():
    lower = replace(ROWS[1], peak_bytes=12 * MB)
    # 12 of 20 MB
    assert title_of("plot_comparison", [ROWS[0], lower]) == [
        "shallow: the lowest peak is that of fsdp (fsdp1), 60 % of ddp's"
    ]


def test_the_style_stays_within_the_figure():
    before = plt.rcParams["axes.spines.top"]
    plots.plot_step_losses({"ddp": [1.0]})
    assert plt.rcParams["axes.spines.top"] == before


# ---------------------------------------------------------------- in words, and for every eye


def of(name: str, *arguments: object) -> str:
    return describe(getattr(plots, name)(*(arguments or FIGURES[name]))[0])


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_described_with_its_numbers(name):
    text = of(name)
    assert 10 < len(text) <= MOST_CHARACTERS and any(character.isdigit() for character in text), text
    assert "\n" not in text and "_child" not in text


def test_lines_say_where_they_begin_and_end():
    fig, ax = plt.subplots()
    ax.plot([1, 2, 3, 4, 5], [2.3, 2.0, 1.8, 1.9, 1.2], label="ddp")
    ax.plot([1, 2], [2.3, 2.0], label="fsdp")
    ax.set(xlabel="step", ylabel="loss (nats)")
    text = "ddp: from 2.3 at 1 to 1.2 at 5, lowest 1.2, highest 2.3. fsdp: 2.3 at 1, 2 at 2."
    assert describe(fig) == f"Figure: loss (nats) against step. {text}"


def test_bars_of_any_figure_say_their_rows():
    fig, (left, right) = plt.subplots(1, 2)
    left.barh([0, 1], [20, 9], label="bytes")
    left.set_yticks([0, 1], ["ddp", "fsdp"])
    right.barh([0, 1], [10, 12])
    right.set(yticks=[], title="time (ms)")
    left.legend()
    # The axes on the right have the rows of those on the left
    assert describe(fig) == "Bars: ddp: 20; fsdp: 9. Key: bytes. Figure: time (ms). Bars: ddp: 10; fsdp: 12."


SAID = {
    "plot_step_losses": "Loss over the global batch in nats. Same losses, bitwise equal. ddp: 2.300 at step 1, 1.800 at step "
    "3, lowest 1.800, highest 2.300. fsdp: 2.300 at step 1, 1.800 at step 3, lowest 1.800, highest 2.300.",
    "plot_digits": "Handwritten digits, from left to right: 1, 7 (wrong: it is 2), 3.",
    # 40 MB from 0.1 s on, until 0.2
    "plot_memory_curve": "One step. The peak comes in backward, 2.5 times what is held between steps. Allocated bytes over "
    "300 ms: 16.0 MB at the beginning, 16.0 MB at the end, 40.0 MB at the peak. The most in each phase: 16.0 MB in "
    "forward, 40.0 MB in backward, 16.0 MB in step.",
    # 4 + 4 + 8 MB are kept; 17 MB are held, so 1 MB is something else; then the parts of the peak
    "plot_held_and_peak": "fsdp: 100 % of what ddp holds, 75 % of its peak. ddp, each of 2 ranks: held 17.0 MB (parameters "
    "4.0, gradients 4.0, optimizer state 8.0, communication buffers 1.0); peak 40.0 MB (parameters 4.0, gradients 4.0, "
    "optimizer state 16.0, communication buffers 16.0). fsdp: held 17.0 MB (parameters 4.0, gradients 4.0, optimizer "
    "state 8.0, communication buffers 1.0); peak 30.0 MB (parameters 4.0, gradients 4.0, optimizer state 8.0, gathered "
    "units 4.0, activations 10.0).",
    "plot_collectives": "One step. In 3 collectives each rank sends 6.00 MB. Rank 0: in forward 1 all_gather; in backward 1 "
    "reduce_scatter; in step 1 all_to_all. Rank 1: in forward 1 all_gather; in backward 1 reduce_scatter; in step 1 "
    "all_to_all.",
    # 30, 25 and 20 MB for two million parameters
    "plot_peak_by_ranks": "Lowest on 2 ranks: ddp, lean, 10.0 bytes per parameter, 80 % of ddp's. Peak on a rank in bytes "
    "per parameter. ddp: 15.0 on 1 rank, 12.5 on 2 ranks. ddp, lean: 15.0 on 1 rank, 10.0 on 2 ranks.",
    "plot_ladder": "The lowest peak is 30.0 MB, 75 % of DDP's 40.0. DDP: held 9.0 MB, peak 40.0 MB, 10 ms per "
    "step, peak predicted at 39.0 MB. + a lever: held 9.0 MB, peak 30.0 MB, 10 ms per step, peak predicted at 39.0 MB. "
    "+ another: held 9.0 MB, peak 32.0 MB, 10 ms per step, peak predicted at 39.0 MB.",
    "plot_comparison": "shallow: the lowest peak is that of ddp and fsdp (fsdp1). ddp: held 9.0 MB, peak 20.0 MB, 10 ms per "
    "step. fsdp (fsdp1): held 9.0 MB, peak 20.0 MB, 10 ms per step. deep: the lowest peak is that of ddp. ddp: held 9.0 "
    "MB, peak 20.0 MB, 10 ms per step.",
    "plot_copies": "Copies of units: 1 to the device, 0 to the host. Copied to the device, in this order: 0.",
}


@pytest.mark.parametrize("name", SAID)
def test_a_figure_is_told_with_its_numbers_and_in_sentences(name):
    assert of(name) == SAID[name]


def test_every_figure_is_told():
    assert {*SAID, "plot_step"} == set(FIGURES)


def test_a_step_is_told_with_its_traffic_and_its_memory():
    assert (
        of("plot_step")
        == f"{SAID['plot_collectives']} {SAID['plot_memory_curve'].replace('One step', 'Memory of rank 0')}"
    )


def test_notes_are_told_in_time():
    trace = step_trace(*PHASES)
    text = of("plot_memory_curve", trace.curve, "One step", plots.moments_of_one_unit(trace))
    assert "Marked: at 50 ms, all-gather: full parameters; at 100 ms, forward has kept its activations; at" in text


def test_a_notebook_gets_twice_the_pixels_and_the_description():
    fig, _ = plots.plot_held_and_peak(*FIGURES["plot_held_and_peak"])
    picture, metadata = described_png(fig)
    content = base64.b64decode(picture)
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))  # of the PNG's first chunk
    assert (width // 2, height // 2) == (metadata["width"], metadata["height"])
    assert metadata["alt"] == describe(fig)


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
