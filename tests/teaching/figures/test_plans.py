"""Figures of plans and errors."""

import pytest

from fsdp_helpers.measuring.prediction_errors import ErrorRow
from fsdp_helpers.planning.models import named_subject
from fsdp_helpers.planning.plan import CATEGORIES, Cluster, Settings, make_plan
from fsdp_helpers.teaching.figures import plans, titles
from fsdp_helpers.teaching.figures.descriptions import describe

SUBJECT = named_subject("vit-b16")


def planned(ranks: int, memory: float = 10e9):
    return make_plan(SUBJECT, Settings(batch=8), Cluster(world_size=ranks, device_memory_bytes=memory))


def error_row(variant: str, real: bool, predicted_bytes: int) -> ErrorRow:
    sizes = dict.fromkeys(("predicted_state_bytes", "state_bytes", "predicted_sent_bytes", "sent_bytes"), 5)
    return ErrorRow(
        model="m",
        variant=variant,
        world_size=2,
        real=real,
        when="",
        predicted_bytes=predicted_bytes,
        peak_bytes=100,
        **sizes,
    )


def test_a_waterfall_adds_up_to_what_is_needed():
    three = [planned(ranks) for ranks in (8, 64, 1024)]
    fig, ax = plans.plot_waterfall(three, "title")
    bars = {container.get_label(): container for container in ax.containers}
    assert list(bars) == [*CATEGORIES.values(), "allowance"]
    for place, plan in enumerate(three):
        total = sum(container[place].get_height() for container in bars.values())
        assert total == pytest.approx(plan.needed_bytes / 1e9)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["8", "64", "1,024"]
    assert "(GB)" in ax.get_ylabel()
    assert list(ax.lines[0].get_ydata()) == [10, 10]  # the device's memory
    assert [text.get_text() for text in ax.texts] == [f"{plan.needed_bytes / 1e9:,.0f}" for plan in three]
    assert describe(fig).startswith("Figure: Fits 10 GB on 8 ranks or more; title;")
    assert f"64: parameters {three[1].by_category()['parameters'] / 1e9:,.4g}, " in describe(fig)


def test_a_waterfall_says_from_how_many_ranks_on_it_fits():
    drawn = [planned(ranks, memory=5.3e9) for ranks in (2, 8, 64)]
    assert [plan.fits for plan in drawn] == [False, True, True]
    assert plans.plot_waterfall(drawn, "A model")[1].get_title("left") == "Fits 5 GB on 8 ranks or more\nA model"
    assert titles.fits_from({8: 30e9, 16: 20e9, 1024: 9e9}, 10e9) == "Fits 10 GB on 1,024 ranks or more"
    assert titles.fits_from({8: 30e9}, 10e9) == "Doesn't fit 10 GB on 8 ranks"
    assert titles.fits_from({8: 3e9, 16: 2e9}, 10e9) == "Fits 10 GB on 8 ranks or more"


def test_losses_that_are_no_numbers_are_not_the_same():
    assert titles.same_losses([(2.0, 1.0), (2.0, 1.0 + 6e-8)]) == "Same losses: they differ by at most 6e-8"
    assert titles.same_losses([(2.0, 1.0), (2.0, float("nan"))]) == ""


def test_what_fits_has_a_line_per_model_a_line_per_device_and_a_mark_at_each_threshold():
    needed = {"one": {8: 30e9, 64: 9e9}, "two": {8: 90e9, 64: 20e9}}
    thresholds = {"one": {24: 12, 40: 4}, "two": {24: 50, 40: None}}
    fig, ax = plans.plot_what_fits(needed, thresholds)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines if not line.get_label().startswith("_")}
    assert drawn == {"one": [30, 9], "two": [90, 20]}
    assert [list(line.get_ydata()) for line in ax.lines if line.get_label().startswith("_")] == [[24, 24], [40, 40]]
    # 4 ranks are fewer than those drawn
    assert [points.get_offsets().tolist() for points in ax.collections] == [[[12, 24]], [[50, 24]]]
    assert "one: 30 at 8, 9 at 64." in describe(fig) and "one fits: 24 at 12." in describe(fig)


def test_errors_are_drawn_in_percent():
    rows = [error_row("DDP", True, 101), error_row("DDP", False, 99), error_row("bf16", True, 100)]
    fig, ax = plans.plot_errors(rows)
    drawn = sorted(round(float(y), 6) for marks in ax.collections for _, y in marks.get_offsets())
    assert drawn == [-1, 0, 1]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["DDP", "bf16"]
    # 1% off twice, exact once
    assert ax.get_title("left") == "3 of 3 peaks within 1%; the worst is 1.0% off; gray: 1%"
    assert "m, real ranks: 1 at 0, 0 at 1. m, a rank of N: -1 at 0.08." in describe(fig)
    assert rows[0].is_exact and rows[0].error == pytest.approx(0.01)
