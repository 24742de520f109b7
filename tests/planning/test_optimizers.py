"""What optimisers keep, and what their steps have in flight: planned, and measured on one process."""

import pytest
import torch
from torch.profiler import record_function

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.planning.optimizers import OPTIMIZERS

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
