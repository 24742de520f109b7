"""Notebook 15's figures show what they are given."""

from matplotlib.colors import to_hex

from fsdp_helpers.planning.dimensions import pipeline_spans
from fsdp_helpers.teaching.figures import dimension_plots
from fsdp_helpers.teaching.figures.descriptions import describe
from fsdp_helpers.teaching.figures.style import OP_COLORS


def test_each_rank_has_what_lies_along_both_dimensions():
    has = {"data": ["first half", "second half"], "tensor": ["head 0", "head 1"]}
    fig, axes = dimension_plots.draw_meshes({("data", "tensor"): has, ("tensor", "data"): has})
    assert [text.get_text() for text in axes[0].texts] == [
        "rank 0\nfirst half\nhead 0",
        "rank 1\nfirst half\nhead 1",
        "rank 2\nsecond half\nhead 0",
        "rank 3\nsecond half\nhead 1",
    ]
    assert axes[1].texts[1].get_text() == "rank 1\nhead 0\nsecond half"
    assert describe(fig).startswith(
        "Four ranks in two dimensions. data by tensor: along data the ranks have first half and second half, along "
        "tensor they have head 0 and head 1."
    )
    fig.canvas.draw()


def test_a_pipeline_is_drawn_with_its_bubble():
    order = ["F0", "F1", "B0", "B1"]
    fig, (ax,) = dimension_plots.draw_pipeline({"GPipe": pipeline_spans([order, order])})
    assert [text.get_text() for text in ax.texts] == order * 2
    assert ax.get_title("left") == "GPipe: 33% of the step is bubble (empty)"  # 1 / (2 + 1)
    assert describe(fig) == "GPipe, 33% bubble. Stage 0: F0 F1 B0 B1. Stage 1: F0 F1 B0 B1."
    fig.canvas.draw()


def test_sent_bytes_are_stacked():
    runs = {"FSDP": {"all_gather": 2_000_000, "reduce_scatter": 1_000_000}, "experts": {"all_to_all": 500_000}}
    fig, ax = dimension_plots.draw_sent(runs)
    bars = [(bar.get_x(), bar.get_width(), to_hex(bar.get_facecolor())) for bar in ax.patches]
    assert bars == [
        (0, 2.0, OP_COLORS["all_gather"]),
        (2.0, 1.0, OP_COLORS["reduce_scatter"]),
        (0, 0.5, OP_COLORS["all_to_all"]),
    ]
    assert "experts: all_to_all 0.5" in describe(fig)
    fig.canvas.draw()
