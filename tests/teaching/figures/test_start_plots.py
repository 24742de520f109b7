"""Notebook 08's figures show what they are given."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from fsdp_helpers.teaching.figures import start_plots
from fsdp_helpers.teaching.figures.descriptions import describe
from fsdp_helpers.teaching.figures.style import OP_COLORS


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_gathers_are_drawn_in_order():
    orders = {"as it is": ["gather 0", "compute 0"], "ahead": ["gather 0", "gather 1", "compute 0", "compute 1"]}
    fig, ax = start_plots.draw_gathers(orders)
    assert [text.get_text() for text in ax.texts] == [entry for order in orders.values() for entry in order]
    gathers = [to_hex(bar.get_facecolor()) == OP_COLORS["all_gather"] for bar in ax.patches]
    assert gathers == [True, False, True, True, False, False]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(orders)
    assert describe(fig) == (
        "Events of a forward in time. as it is: gather 0, compute 0. ahead: gather 0, gather 1, compute 0, compute 1."
    )
    fig.canvas.draw()
