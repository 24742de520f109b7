import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from fsdp_helpers.planning.streams import step_spans
from fsdp_helpers.teaching.figures import drawings
from fsdp_helpers.teaching.figures.descriptions import describe
from fsdp_helpers.teaching.figures.style import OP_COLORS, STATE_COLORS

SPANS = step_spans(2, forward_s=2e-3, gather_s=1e-3, reduce_s=1e-3, prefetch=True)
DRAWINGS = {
    "draw_streams": ({"gathered early": SPANS}, "2 ms of forward"),
    "draw_step": ("FSDP",),
    "draw_units": (["net", "first", "second"],),
    "draw_gathers": ({"as it is": ["gather 0", "compute 0"], "ahead": ["gather 0", "gather 1"]},),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", DRAWINGS)
def test_every_drawing_has_room_for_its_labels(name):
    fig, ax = getattr(drawings, name)(*DRAWINGS[name])
    fig.canvas.draw()  # labels that do not fit, glyphs that are missing: this is where they are noticed
    assert fig.axes == [ax]


def filled(ax: Axes, kind: str) -> int:
    """How many shards of one kind of state are filled in a drawing."""
    return sum(to_hex(box.get_facecolor()) == STATE_COLORS[kind] and box.get_fill() for box in ax.patches)


def test_a_step_of_fsdp_fills_what_each_rank_has():
    ax = drawings.draw_step("FSDP", num_ranks=2)[1]
    # Two ranks, two shards each: parameters are a shard, whole, whole, a shard
    assert filled(ax, "parameters") == 2 * (1 + 2 + 2 + 1)
    assert filled(ax, "gradients") == 2 * (1 + 0 + 2 + 1)
    assert filled(ax, "optimizer") == 2 * (1 + 1 + 1 + 1)
    assert sum(bool(box.get_hatch()) for box in ax.patches) == 2 * 2  # before the reduce-scatter, each rank its own


def test_a_step_of_ddp_fills_everything_but_gradients_in_forward():
    ax = drawings.draw_step("DDP", num_ranks=3)[1]
    assert [filled(ax, kind) for kind in ("parameters", "gradients", "optimizer")] == [36, 27, 36]


def stretches(ax: Axes, kind: str) -> dict[int, list[tuple[float, float]]]:
    """From when to when one kind of state is whole, for each row of the drawing of units."""
    found = {}
    for bar in ax.patches:
        if to_hex(bar.get_facecolor()) == STATE_COLORS[kind]:
            row = round(bar.get_y() + bar.get_height() / 2)
            found.setdefault(row, []).append((bar.get_x(), bar.get_x() + bar.get_width()))
    return found


def test_parameters_and_gradients_of_a_unit_coexist_and_backward_gathers_ahead():
    ax = drawings.draw_units(["net", "first", "second"])[1]
    parameters, gradients = stretches(ax, "parameters"), stretches(ax, "gradients")
    assert (parameters[1][0], parameters[2][0]) == ((0, 1), (1, 2)), "forward, one unit after the other"
    # Forward ends at 2.25. Backward: the second unit from there to 3.25, the first one after it, to 4.25.
    assert gradients[2] == [(2.25, 3.25)] and gradients[1] == [(3.25, 4.25)]
    assert parameters[2][1] == (2.25, 3.25), "unsharded next to its gradients"
    assert parameters[1][1] == (2.25, 4.25), "unsharded while backward is busy with the second unit"
    assert parameters[0][0][0] == 0 and parameters[0][0][1] > 4.25, "the root outlasts them all"
    assert gradients[0] == [(2.25, parameters[0][0][1])], "the head's gradient is there before the last unit's backward"


def test_streams_are_drawn_where_they_were_computed():
    ax = drawings.draw_streams({"early": SPANS}, "2 ms of forward")[1]
    bars = [(round(bar.get_y() + 0.35), bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert bars[:2] == [(0, 1.0, 2.0), (0, 3.0, 2.0)]  # in ms: the forwards of both units, after the first gather
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["early: arithmetic", "early: communication"]
    assert "not measured: computed from 2 ms of forward" in ax.get_xlabel()


def test_gathers_are_drawn_in_order():
    orders = {"as it is": ["gather 0", "compute 0"], "ahead": ["gather 0", "gather 1", "compute 0", "compute 1"]}
    ax = drawings.draw_gathers(orders)[1]
    assert [text.get_text() for text in ax.texts] == [entry for order in orders.values() for entry in order]
    gathers = [to_hex(bar.get_facecolor()) == OP_COLORS["all_gather"] for bar in ax.patches]
    assert gathers == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "draw_step",
            "Stage 2, forward: parameters in full on every rank, gradients none, optimizer a shard on each rank. "
            "Next: backward. Stage 3, end of backward: parameters in full on every rank, gradients in full on every rank "
            "(from its own images only), optimizer a shard on each rank. Next: reduce-scatter.",
        ),
        ("draw_units", "The root, net, stays unsharded from its first all-gather"),
        ("draw_units", "Unsharded one unit early in backward: first."),
        ("draw_streams", "gathered early: 14.0 ms, during which arithmetic waits for 2.0 ms."),
        ("draw_gathers", "as it is: gather 0, compute 0; ahead: gather 0, gather 1."),
    ],
)
def test_a_drawing_in_words(name, said):
    assert said in describe(getattr(drawings, name)(*DRAWINGS[name])[0])
