"""Figures of plans and errors."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex, to_rgb

from fsdp_helpers.measuring.errors import ErrorRow
from fsdp_helpers.planning.models import named_subject
from fsdp_helpers.planning.plan import CATEGORIES, Cluster, Settings, make_plan
from fsdp_helpers.teaching.figures import findings, plans
from fsdp_helpers.teaching.figures.descriptions import describe

SUBJECT = named_subject("vit-b16")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def planned(ranks: int, memory: float = 10e9):
    return make_plan(SUBJECT, Settings(batch=8), Cluster(world_size=ranks, device_memory_bytes=memory))


def error_row(variant: str, real: bool, predicted_bytes: int) -> ErrorRow:
    sizes = dict.fromkeys(
        ("predicted_state_bytes", "state_bytes", "predicted_sent_bytes", "sent_bytes", "accelerate_bytes"), 5
    )
    return ErrorRow(
        model="m",
        variant=variant,
        world_size=2,
        real=real,
        when="",
        predicted_bytes=predicted_bytes,
        peak_bytes=100,
        deepspeed_bytes=5,
        **sizes,
    )


def test_a_waterfall_adds_up_to_what_is_needed():
    three = [planned(ranks) for ranks in (8, 64, 1024)]
    fig, ax = plans.plot_waterfall(three, "title")
    bars = {container.get_label(): container for container in ax.containers}
    assert list(bars) == [*CATEGORIES.values(), "outside the count"]
    for place, plan in enumerate(three):
        total = sum(container[place].get_height() for container in bars.values())
        assert total == pytest.approx(plan.needed_bytes / 1e9)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["8", "64", "1,024"]
    assert "(GB)" in ax.get_ylabel()
    assert list(ax.lines[0].get_ydata()) == [10, 10]  # the device's memory
    assert [text.get_text() for text in ax.texts] == [f"{plan.needed_bytes / 1e9:,.0f}" for plan in three]
    largest = max(three[0].by_category().items(), key=lambda part: part[1])
    first = f"8 ranks: {three[0].needed_bytes / 1e9:,.0f} GB, the largest part {largest[0]} with {largest[1] / 1e9:,.0f} GB."
    assert describe(fig).startswith("title. Fits 10 GB from 8 ranks on. " + first)


def test_a_waterfall_says_from_how_many_ranks_on_it_fits():
    drawn = [planned(ranks, memory=5.3e9) for ranks in (2, 8, 64)]
    assert [plan.fits for plan in drawn] == [False, True, True]
    assert plans.plot_waterfall(drawn, "A model")[1].get_title("left") == "Fits 5 GB from 8 ranks on\nA model"
    assert findings.fits_from({8: 30e9, 16: 20e9, 1024: 9e9}, 10e9) == "Fits 10 GB from 1,024 ranks on"
    assert findings.fits_from({8: 30e9}, 10e9) == "Does not fit 10 GB on 8 ranks"
    assert findings.fits_from({8: 3e9, 16: 2e9}, 10e9) == "Fits 10 GB from 8 ranks on"


def test_losses_that_are_no_numbers_are_not_the_same():
    assert findings.same_losses([(2.0, 1.0), (2.0, 1.0 + 6e-8)]) == "Same losses: at most 6e-8 apart"
    assert findings.same_losses([(2.0, 1.0), (2.0, float("nan"))]) == ""


def test_what_fits_is_marked_by_more_than_a_color():
    rows = [[planned(8, memory), planned(64, memory)] for memory in (1e9, 10e9)]
    fig, axes = plans.plot_what_fits({"one": rows, "another": rows})
    texts = [text.get_text() for text in axes[0].texts]
    assert [text.endswith("✗") for text in texts] == [True, True, False, False]
    # red, red, green, green: 1 GB does not hold it, 10 GB do
    assert [to_hex(cell.get_facecolor()) for cell in axes[0].patches] == [plans.FITS_NOT] * 2 + [plans.FITS] * 2
    (red, green, _), (red_not, green_not, _) = to_rgb(plans.FITS), to_rgb(plans.FITS_NOT)
    assert green > red and red_not > green_not
    # ranks across, memory down, in each cell what a rank needs
    assert [text.split()[0] for text in texts] == [f"{plan.needed_bytes / 1e9:,.0f}" for row in rows for plan in row]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["8", "64"]
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == ["1", "10"]
    # 1 GB is too little on 8 and on 64 ranks, 10 GB are enough on 8
    assert axes[0].get_title(loc="left") == "Fits 10 GB from 8 ranks on\none" and "(GB)" in axes[0].get_ylabel()
    needed = ", ".join(f"{text.split()[0]} GB on {ranks} ranks" for text, ranks in zip(texts, (8, 64), strict=False))
    assert describe(fig).startswith(f"one needs {needed}. Fits 10 GB from 8 ranks on. another needs")
    nowhere = plans.plot_what_fits({"one": rows[:1]})[1][0]
    assert nowhere.get_title(loc="left") == "Does not fit 1 GB on 64 ranks\none"


def test_errors_are_drawn_in_percent():
    rows = [error_row("DDP", True, 101), error_row("DDP", False, 99), error_row("bf16", True, 100)]
    fig, ax = plans.plot_errors(rows)
    drawn = sorted(round(float(y), 6) for marks in ax.collections for _, y in marks.get_offsets())
    assert drawn == [-1, 0, 1]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["DDP", "bf16"]
    # 1 % off twice, exact once
    assert ax.get_title("left") == "3 of 3 peaks within 1 %; the worst is 1.0 % off; gray: 1 %"
    assert describe(fig) == (
        "3 of 3 peaks within 1 %; the worst is 1.0 % off. "
        "DDP: 2 predictions, -1.00 % to +1.00 %. bf16: 1 prediction, +0.00 % to +0.00 %."
    )
    assert rows[0].is_exact and rows[0].error == pytest.approx(0.01)
