"""Notebook 08's figures show what they are given."""

import matplotlib.pyplot as plt
import pytest

from fsdp_helpers.records import MemoryCurve
from fsdp_helpers.teaching.figures import start_plots


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_starts_share_one_scale():
    curve = MemoryCurve(times_s=(0.0, 0.1, 0.2), allocated_bytes=(0, 40_000_000, 20_000_000))
    fig, axes = start_plots.plot_starts({"whole": curve, "on meta, drawn": curve}, 40_000_000, 20_000_000)
    assert [ax.get_title(loc="left") for ax in axes] == ["whole", "on meta,\ndrawn"]
    assert "MB" in axes[0].get_ylabel() and axes[0].get_ylim() == axes[1].get_ylim()
    assert [list(line.get_ydata()) for line in axes[0].lines] == [[40, 20], [40, 40], [20, 20]]  # curve, model, slices
    # beside the last panel, where no curve runs through them
    assert [text.get_text() for text in axes[-1].texts] == ["the whole\nmodel", "its slices"]
    assert all(text.get_position()[0] > 1 for text in axes[-1].texts)
    # from the first byte on
    assert axes[0].get_xlim() == (0.1, 0.2)
    fig.canvas.draw()


def test_gathers_are_drawn_in_order():
    orders = {"as it is": ["gather 0", "compute 0"], "ahead": ["gather 0", "gather 1", "compute 0", "compute 1"]}
    fig, ax = start_plots.draw_gathers(orders)
    assert [text.get_text() for text in ax.texts] == [entry for order in orders.values() for entry in order]
    assert [bar.get_hatch() for bar in ax.patches] == ["////", None, "////", "////", None, None]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(orders)
    fig.canvas.draw()
