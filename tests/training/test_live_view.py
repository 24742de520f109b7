"""A watched run as a notebook shows it: text and a picture, replaced in place, and a summary that stays."""

import base64
from dataclasses import replace

import launch_workers as workers
import pytest
from matplotlib.figure import Figure
from runs import tiny_record

from fsdp_helpers.progress import Report
from fsdp_helpers.quantities import MB
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training import live_view
from fsdp_helpers.training.live_view import LiveView


@pytest.fixture
def outputs(monkeypatch):
    """The outputs of a cell, each as it was shown last: (data, metadata)."""
    shown = []

    class Handle:
        def __init__(self, place):
            self.place = place

        def update(self, data, metadata=None, raw=False):
            shown[self.place] = (data, metadata)

    def display(data, metadata=None, raw=False, display_id=None):
        assert raw and display_id
        shown.append((data, metadata))
        return Handle(len(shown) - 1)

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(live_view, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(live_view, "SECONDS_BETWEEN_CURVES", -1.0)
    return shown


def watched() -> LiveView:
    view = LiveView()
    view.start("shallow, ddp, 2 ranks on cpu")
    view.start("train_worker, 2 ranks on cpu")  # within it, and not said
    for rank, done, loss in ((0, 0, None), (0, 1, 2.3), (1, 1, 2.2), (0, 2, 2.0), (1, 2, 2.1)):
        view.update(Report(done, 4, "shallow, ddp, 2 ranks on cpu", f"loss {loss}", loss), rank)
    return view


def test_a_line_for_each_rank_and_a_curve_of_the_first(outputs):
    watched().close()
    (lines, _), (curve, metadata) = outputs
    title, first, second = lines["text/plain"].splitlines()
    assert title == "shallow, ddp, 2 ranks on cpu"
    assert first.startswith("rank 0:  50%|") and " 2/4 " in first and "loss 2.0" in first
    assert second.startswith("rank 1:  50%|") and "loss 2.1" in second
    assert base64.b64decode(curve["image/png"]).startswith(b"\x89PNG")
    alt = "Loss of rank 0's images: from 2.300 to 2.000; shallow, ddp, 2 ranks on cpu, steps 1 to 2."
    assert curve["text/plain"] == metadata["image/png"]["alt"] == alt


def test_a_launch_keeps_the_view_that_it_is_given(outputs):
    view = LiveView()
    view.start("shallow, ddp, 2 ranks on cpu")
    launch(workers.report_progress, 5, world_size=2, device="cpu", progress=view)
    ((lines, _),) = outputs  # the line at the start was replaced in place
    title, first, second = lines["text/plain"].splitlines()
    assert title == "counting"
    assert first.startswith("rank 0: 100%|") and second.startswith("rank 1: 100%|") and " 5/5 " in second


def test_a_summary_takes_their_place(outputs):
    view, record = watched(), tiny_record()
    record = replace(record, step_losses=(2.3, 2.1, 1.9, 1.8))
    view.close()
    view.summarize(record)
    (lines, _), (curve, metadata) = outputs
    accuracy = f"{record.epochs[-1].test_accuracy:.2%}"
    assert lines["text/plain"].startswith(f"shallow, ddp, 2 ranks on cpu: 4 steps, test accuracy {accuracy}")
    assert lines["text/plain"].splitlines()[1:] == ["rank 0: held 16 B, peak 40 B"]
    assert "over the global batch" in curve["text/plain"] and "to 1.800" in metadata["image/png"]["alt"]
    assert all("widget" not in kind for data, _ in outputs for kind in data)


@pytest.fixture
def curves(monkeypatch):
    """The steps and losses of every curve, and the memory of the ranks beside it."""
    drawn, draw = [], live_view.run_picture

    def run_picture(steps, losses, memory, title):
        drawn.append((list(steps), list(losses), dict(memory)))
        return draw(steps, losses, memory, title)

    monkeypatch.setattr(live_view, "run_picture", run_picture)
    return drawn


def test_the_curve_of_a_resumed_run_begins_after_the_steps_before(outputs, curves):
    view = LiveView()
    for done, loss in ((10, None), (11, 1.2), (12, 1.0)):
        view.update(Report(done, 14, "shallow, ddp, 2 ranks on cpu", "", loss))
    assert curves == [([11, 12], [1.2, 1.0], {})]
    # two of the four steps that were left have been taken: what is left is reckoned from them alone
    bar = outputs[0][0]["text/plain"].splitlines()[1]
    assert bar.startswith("rank 0:  86%|") and " 12/14 " in bar
    view.summarize(replace(tiny_record(), step_losses=(1.2, 1.0, 0.9, 0.8), first_step=10))
    assert curves[-1] == ([11, 12, 13, 14], [1.2, 1.0, 0.9, 0.8], {0: (16, 40)})
    assert "from 1.200 to 0.800; shallow, ddp, 2 ranks on cpu, steps 11 to 14" in outputs[1][0]["text/plain"]


def test_the_memory_of_each_rank_is_drawn_as_soon_as_it_is_known(outputs, curves):
    view = LiveView()
    for rank, done, memory in ((0, 1, None), (0, 2, None), (0, 3, (16, 40)), (1, 3, (16, 38)), (0, 4, (16, 40))):
        view.update(Report(done, 9, "shallow, ddp, 2 ranks on cpu", "", 2.0, memory), rank)
    assert [memory for *_, memory in curves] == [
        {},
        {0: (16, 40)},
        {0: (16, 40), 1: (16, 38)},
        {0: (16, 40), 1: (16, 38)},
    ]


def test_a_loss_is_smoothed_over_a_twentieth_of_the_run_and_one_that_is_no_number_is_drawn_too():
    losses = [2.3012, 2.2534, 2.1987]  # nothing to average; differences of their sums are not these numbers
    assert live_view.smoothed(losses) == losses
    jagged = live_view.smoothed([1.0, 3.0] * 20)  # 40 steps: each with the one before it
    assert jagged[0] == 1.0 and set(jagged[1:]) == {2.0}
    live_view.draw_loss(Figure().subplots(), [1, 2], [float("nan")] * 2)


def test_bars_of_memory_are_as_long_as_the_bytes():
    ax = Figure().subplots()
    live_view.draw_memory(ax, {0: (16 * MB, 40 * MB), 1: (16 * MB, 38 * MB)})
    assert [bar.get_width() for bar in ax.patches] == [40, 38, 16, 16]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["rank 0", "rank 1"]
