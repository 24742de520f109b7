"""What optimizers keep, and what their steps have in flight: planned, and measured on one process."""

import pytest
import torch
from torch.profiler import record_function

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.planning.optimizers import OPTIMIZERS
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.planning.precisions import PRECISIONS
from fsdp_helpers.planning.profile import Moment, StepProfile
from fsdp_helpers.planning.walk.ledger import Ledger
from fsdp_helpers.planning.walk.units import Shards

SIZES = [(300, 500), (100, 200), (1000,), (400, 250)]  # 271,000 values, the largest 150,000
RUN_HERE = {
    "adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "adam-foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "adam-loop": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def test_all_but_one_are_measured():
    """Adam in 8 bits needs bitsandbytes and is planned from its paper."""
    assert {*RUN_HERE} == {*OPTIMIZERS} - {"adam-8bit"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "pure bf16"])
@pytest.mark.parametrize("name", RUN_HERE)
def test_a_step_has_as_much_in_flight_as_planned(name, dtype):
    with trace_memory(torch.device("cpu")) as trace:
        parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in SIZES]
        optimizer = RUN_HERE[name](parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(2):  # the first step makes the moments
            with record_function("update"):
                optimizer.step()
    curve = trace.last("update").curve
    planned, values = OPTIMIZERS[name], [parameter.numel() for parameter in parameters]
    size, scalars = dtype.itemsize, 2 * 64 * len(SIZES)  # Adam's count of steps is a tensor of each parameter
    kept = 2 * size * sum(values) + planned.state_bytes(sum(values), size)
    in_flight = size * planned.in_flight_values(sum(values), max(values))
    print(f"{name}, {dtype}: {curve.held_bytes - kept:,} more kept, {curve.peak_bytes - curve.held_bytes:,} in flight")
    assert curve.held_bytes == pytest.approx(kept, abs=scalars)
    assert curve.peak_bytes - curve.held_bytes == pytest.approx(in_flight, rel=0.01, abs=scalars)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_table_of_chapter_09(name):
    """Peaks without activations, of ten tensors with 256,000 values: FSDP needs less than DDP from two ranks on."""
    tensors, values = [f"tensor{number}" for number in range(10)], 256_000
    events = [("enter_forward", ""), ("leave_forward", ""), ("enter_backward", "")]
    events += [("gradient", tensor) for tensor in tensors]
    moments = tuple(Moment(event=event, name=of, activation_bytes=0, highest_bytes=0) for event, of in events)
    profile = StepProfile(shapes=dict.fromkeys(tensors, (values // 10,)), moments=moments)

    def peak(ranks: int, **settings: str) -> float:
        step = walk_step(profile, TrainConfig(**settings), ranks, backend="nccl", optimizer=name)
        return step.peak.bytes / values

    state = OPTIMIZERS[name].state_bytes(values) / values
    in_flight = 4 * OPTIMIZERS[name].in_flight_values(values, values // 10) / values
    # parameters, gradients and buckets: 12; shards, the gathered unit, and the buffer that it came in: 4 / N + 8
    assert peak(2, strategy="ddp") == pytest.approx(12 + state + in_flight)
    for ranks in (2, 8):
        assert peak(ranks, strategy="fsdp") == pytest.approx((4 + state) / ranks + 8)
        assert peak(ranks, strategy="fsdp") < peak(ranks, strategy="ddp")


def test_on_two_ranks_half_as_much_is_in_flight():
    profile = StepProfile(shapes={"a": (100,), "b": (20,)}, moments=())
    held = {"adam-foreach": 4 * 60, "adam-loop": 4 * 2 * 50, "adam": 0}  # bytes in flight
    for name, in_flight_bytes in held.items():
        ledger = Ledger()
        Shards(profile, 2, 1, (), "nccl", ledger, PRECISIONS["fp32"], OPTIMIZERS[name]).update()
        assert ledger.peak.bytes == 12 * 60 + in_flight_bytes, name


def test_moments_in_8_bits_have_a_scale_for_256_values():
    assert OPTIMIZERS["adam-8bit"].state_bytes(256) == 2 * 256 + 2 * 4
    assert OPTIMIZERS["adam-8bit"].state_bytes(257) == 2 * 257 + 2 * 2 * 4
