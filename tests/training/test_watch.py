"""What a watched run says of itself, on a clock that the test moves."""

import itertools
import time

import pytest
import torch
from torch import nn

from fsdp_helpers import progress
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training.watch import StepWatch, run_title


class NoTrace:
    """Memory that is not looked at."""

    def __init__(self, device: torch.device) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def last(self, name: str, **settings) -> None:
        return None


@pytest.fixture
def reports(monkeypatch):
    """All reports of this process: none is held back because the last one was a moment ago."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_REPORTS", -1.0)
    seen = []
    progress.send_reports_to(seen.append)
    yield seen
    progress.send_reports_to(None)


@pytest.fixture
def watching(reports, monkeypatch):
    """A watch that has begun an epoch; half a second passes from each reading of the clock to the next."""
    readings = itertools.count(step=0.5)
    monkeypatch.setattr("fsdp_helpers.training.watch.time.perf_counter", lambda: next(readings))
    monkeypatch.setattr("fsdp_helpers.training.watch.MemoryTrace", NoTrace)

    def begin(num_steps: int, *between_steps, epochs: int = 1, **place) -> StepWatch:
        model = nn.Linear(1, 1)
        config = TrainConfig(global_batch_size=64, epochs=epochs)
        watch = StepWatch(config, num_steps, torch.device("cpu"), **place)
        watch.watch(model, torch.optim.Adam(model.parameters()), *between_steps)
        watch.begin_epoch(0)
        return watch

    return begin


def test_a_report_says_images_per_second_of_the_epoch(watching, reports):
    watch = watching(3, epochs=2)
    watch.after_step(torch.tensor(2.0), batch_bytes=0)
    watch.after_step(torch.tensor(1.0), batch_bytes=0)
    watch.begin_epoch(1)  # starts the count again
    watch.after_step(torch.tensor(0.5), batch_bytes=0)
    assert watch.step_seconds == [0.5, 0.5, 0.5]
    # 64 images in 0.5 s, then 128 in 1.0 s; then 64 of the second epoch in 0.5 s
    assert {title for _, _, title, *_ in reports} == {"shallow, local, 1 rank on cpu"}
    assert [(done, total, details) for done, total, _, details, *_ in reports] == [
        (0, 3, ""),  # from here on the bar counts the time
        (1, 3, "epoch 1/2, 128 images/s, loss 2.0000"),
        (2, 3, "epoch 1/2, 128 images/s, loss 1.0000"),
        (3, 3, "epoch 2/2, 128 images/s, loss 0.5000"),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_report_of_several_ranks_says_whose_loss_it_is(watching, reports, rank):
    watch = watching(1, world_size=2, rank=rank)
    watch.after_step(torch.tensor(2.0), batch_bytes=0)
    assert reports[-1][3] == f"128 images/s, rank {rank}'s loss 2.0000"


def test_a_resumed_run_counts_on(watching, reports):
    watch = watching(2, steps_before=10)
    watch.after_step(torch.tensor(2.0), batch_bytes=0)
    batches = [(torch.empty(size, 1), torch.empty(size)) for size in (1_000, 500)]
    assert list(watch.evaluation(batches)) == batches
    # 64 images in half a second, whatever the run before did
    assert [(done, total, details) for done, total, _, details, *_ in reports] == [
        (10, 12, ""),
        (11, 12, "128 images/s, loss 2.0000"),
        (11, 12, "evaluating, 0 images so far"),
        (11, 12, "evaluating, 1,000 images so far"),
        (11, 12, "128 images/s, loss 2.0000"),
    ]


@pytest.mark.parametrize(
    "settings, world_size, title",
    [
        ({"strategy": "fsdp-auto-wrap", "api": "fsdp1"}, 2, "shallow, fsdp-auto-wrap (fsdp1), 2 ranks on cpu"),
        ({"strategy": "fsdp-auto-wrap"}, 3, "shallow, fsdp-auto-wrap (fsdp2), 3 ranks on cpu"),
        ({"strategy": "ddp", "bucket_view": True}, 1, "shallow, ddp, lean, 1 rank on cpu"),
    ],
)
def test_a_title_says_what_differs(settings, world_size, title):
    assert run_title(TrainConfig(**settings), world_size, "cpu") == title


def test_what_happens_between_steps_does_not_count(watching):
    """A checkpoint, say: here it reads the clock ten times, which is five seconds."""
    watch = watching(2, lambda: [time.perf_counter() for _ in range(10)])
    for _ in range(2):
        watch.after_step(torch.tensor(1.0), batch_bytes=0)
    assert watch.step_seconds == [0.5, 0.5]
