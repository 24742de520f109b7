import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from fsdp_helpers.measuring.memory import state_bytes, trace_memory
from fsdp_helpers.models.series import build_model


def one_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.zeros(2, 1, 28, 28)), torch.tensor([0, 1])).backward()
    optimizer.step()
    return optimizer


def test_state_of_shallow_net():
    model = build_model("shallow")
    state = state_bytes(model, one_step(model))
    # 1,199,882 parameters x 4 bytes; gradients the same; Adam keeps two values a parameter
    assert state.parameter_bytes == 4_799_528
    assert state.gradient_bytes == 4_799_528
    assert state.optimizer_bytes == 9_599_056
    assert state.total_bytes == 16 * 1_199_882


class Doubler(nn.Module):
    """Holds 1,000 values; its forward allocates 2,000 more and gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))

    def forward(self) -> torch.Tensor:
        workspace = torch.empty(2000)
        del workspace
        return self.weight


def test_a_known_allocation_appears_to_the_byte():
    with trace_memory("cpu") as trace:
        model = Doubler()
        with record_function("train step"), record_function("forward"):
            model()
    curve = trace.last("train step").curve
    # 1,000 values x 4 bytes are held before, during and after; 2,000 x 4 bytes come and go
    assert curve.allocated_bytes[0] == 4_000
    assert curve.peak_bytes == 4_000 + 8_000
    assert curve.held_bytes == 4_000


def test_the_peak_of_a_mark_is_that_until_the_next():
    with trace_memory("cpu") as trace:
        for values in (100, 1_000, 10):
            with record_function("mark"):
                pass
            workspace = torch.empty(values)
            del workspace
    assert trace.between_marks("mark") == [(0, 400), (0, 4_000), (0, 40)]


def test_last_takes_the_last_and_subtracts_what_does_not_count():
    with trace_memory("cpu") as trace:
        kept = []
        for size in (10, 20):
            with record_function("train step"):
                kept.append(torch.empty(size))
    # the second step ends with 10 + 20 = 30 values, 120 bytes, of which 40 are not to be counted
    assert trace.last("train step", uncounted_bytes=40).curve.held_bytes == 80


def test_an_unknown_stretch_is_an_error_that_helps():
    with trace_memory("cpu") as trace:
        torch.empty(1)
    with pytest.raises(ValueError, match=r"the trace has no 'epoch'; mark it with torch.profiler.record_function"):
        trace.last("epoch")


def train_the_doubler(num_steps: int) -> None:
    images = []
    for size in (20, 30):  # loaded in two phases
        with record_function("data"):
            images.append(torch.empty(size))
    model = Doubler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model().sum().backward()
        optimizer.step()
    assert len(images) == 2


def test_the_last_step_is_found_without_a_mark():
    with trace_memory("cpu") as trace:
        train_the_doubler(num_steps=3)
        kept = torch.empty(10_000)  # after the last step: no part of it
    curve = trace.last_step().curve
    # Weights and gradients, 1,000 values of 4 bytes each, from step to step; the images, 200 bytes, do not count.
    # Within the step the gradients go, and 2,000 values of workspace come and go. Scalars take a few bytes.
    assert curve.allocated_bytes[0] == pytest.approx(8_000, abs=50)
    assert curve.held_bytes == pytest.approx(8_000, abs=50)
    assert curve.peak_bytes == pytest.approx(4_000 + 8_000, abs=50)
    assert len(kept) == 10_000


def test_one_step_is_no_steady_one():
    with trace_memory("cpu") as trace:
        train_the_doubler(num_steps=1)
    with pytest.raises(ValueError, match="needs 2 or more optimizer steps, and has 1"):
        trace.last_step()


def test_a_slow_start_does_not_shift_the_clock(monkeypatch, tmp_path):
    """Phases come from the profiler's clock and collectives from Python's: both must tell the same time."""
    delays_s = [0.1]  # the first mark may have to wait for its turn on a busy machine

    def delayed(name):
        time.sleep(delays_s.pop() if delays_s else 0)
        return record_function(name)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting-point", rank=0, world_size=1)
    monkeypatch.setattr("fsdp_helpers.measuring.memory.record_function", delayed)
    with trace_memory("cpu") as trace:
        dist.all_reduce(torch.ones(1))
        with record_function("train step"):
            dist.all_reduce(torch.ones(2))
    assert [seen.bytes for seen in trace.last("train step").collectives] == [8]
