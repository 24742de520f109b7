"""What a rank holds on CUDA, by the rules of its caching allocator: nothing here needs a GPU."""

import time

import pytest
import torch
from caching_allocator import CachingAllocator
from torch import nn
from torch.profiler import record_function

from fsdp_helpers.measuring.collectives import CollectiveTrace
from fsdp_helpers.measuring.memory import MemoryTrace, requested_points
from fsdp_helpers.models.series import build_model

STEPS = 3
MIB = 2**20


def held_between_steps(
    model: nn.Module, batch: int, *, shards: int = 1, buckets: bool = False
) -> tuple[int, int, CachingAllocator]:
    """By the allocator's rules, after three steps of Adam on MNIST: requested and allocated, without images.

    The dataset lies on the device before the history begins; the batch is the last thing that a step allocates.
    """
    gpu = CachingAllocator()
    images = [5_120 * 784 * 4, 5_120 * 8, 2_000 * 784 * 4, 2_000 * 8]
    for size in images:
        gpu.malloc(size)
    gpu.noted.clear()
    sizes = [parameter.nbytes // shards for parameter in model.parameters()]
    for size in sizes:  # parameters
        gpu.malloc(size)
    if buckets:
        gpu.malloc(sum(sizes))
    for size in sizes:  # gradients
        gpu.malloc(size)
    for size in sizes:  # two moments and, since Adam is fused, a step counter on the device
        for part in (size, size, 4):
            gpu.malloc(part)
    for _ in range(STEPS):  # losses
        gpu.malloc(4)
    batch_bytes = [batch * 784 * 4, batch * 8]
    for size in batch_bytes:
        gpu.malloc(size)
    requested = requested_points(gpu.noted)[-1][1] - sum(batch_bytes)
    return requested, gpu.allocated_bytes - sum(images) - sum(batch_bytes), gpu


@pytest.mark.parametrize(
    "name, num_params, batch, shards, buckets, bytes_per_parameter, blocks_over_formula",
    [
        ("shallow", 1_199_882, 256, 1, False, 16, 1.067),  # 01
        ("shallow", 1_199_882, 64, 1, True, 20, 1.050),  # 02
        ("shallow", 1_199_882, 48, 2, False, 16, 1.077),  # 03, 05
        ("deep", 94_104_234, 64, 1, False, 16, 1.001),  # 01
    ],
)
def test_held_is_the_formula_in_requests_and_more_in_blocks(
    name, num_params, batch, shards, buckets, bytes_per_parameter, blocks_over_formula
):
    with torch.device("meta"):
        model = build_model(name)
    requested, in_blocks, _ = held_between_steps(model, batch, shards=shards, buckets=buckets)
    formula = bytes_per_parameter * num_params // shards
    num_tensors = len(list(model.parameters()))
    # Beyond the formula: a step counter of 4 bytes for each tensor, and a loss of 4 bytes for each step
    assert requested == formula + 4 * num_tensors + 4 * STEPS
    assert formula <= requested <= 1.0001 * formula  # what 01, 02, 03 and 05 assert, with room to spare
    assert in_blocks / formula == pytest.approx(blocks_over_formula, abs=0.001)  # what they would have met in blocks


def test_the_model_rounds_as_the_allocator_does():
    gpu = CachingAllocator()
    gpu.malloc(1)
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (512, 2 * MIB)
    gpu.malloc(19 * MIB + 1)  # from a segment of its own, a multiple of 2 MiB: less than 1 MiB is left, and not split
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (512 + 20 * MIB, 22 * MIB)
    gpu.malloc(2 * MIB)  # 20 MiB, of which 18 are left
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (512 + 22 * MIB, 42 * MIB)


def test_only_what_was_made_within_the_history_counts():
    noted = [
        {"action": "free_requested", "addr": 1, "size": 100, "time_us": 1_000_000},  # made before
        {"action": "segment_alloc", "addr": 2, "size": 2 * MIB, "time_us": 1_500_000},
        {"action": "alloc", "addr": 2, "size": 700, "time_us": 2_000_000},
        {"action": "alloc", "addr": 3, "size": 10, "time_us": 3_000_000},
        {"action": "free_requested", "addr": 2, "size": 700, "time_us": 4_000_000},  # a stream still reads it
        {"action": "alloc", "addr": 4, "size": 5, "time_us": 5_000_000},
        {"action": "free_completed", "addr": 2, "size": 700, "time_us": 6_000_000},
    ]
    assert requested_points(noted) == [(2.0, 700), (3.0, 710), (4.0, 10), (5.0, 15)]


@pytest.fixture
def imagined_gpu(monkeypatch):
    """torch.cuda as a memory trace sees it, with a clock that tells Unix time; returns the allocator."""
    gpu = CachingAllocator()

    def record(enabled, **_) -> None:
        gpu.is_recorded = enabled is not None
        if enabled:
            gpu.noted.clear()

    monkeypatch.setattr("fsdp_helpers.measuring.memory.take_work_spaces", lambda device: gpu.malloc(8 * MIB))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [gpu.noted]})
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: gpu.reserved_bytes)
    return gpu


def malloc_now(gpu: CachingAllocator, size: int) -> int:
    gpu.time_us = time.time_ns() // 1000
    address = gpu.malloc(size)
    time.sleep(0.002)  # more than clocks may be apart
    return address


def test_a_step_on_cuda_is_found_in_the_allocators_history(imagined_gpu):
    """The phases come from the profiler and the bytes from the allocator: both have to tell the same time."""
    trace = MemoryTrace(torch.device("cuda", 0))
    trace.start()
    for _ in range(2):
        with record_function("train step"):
            time.sleep(0.002)
            kept = malloc_now(imagined_gpu, 1_000)
            workspace = malloc_now(imagined_gpu, 50)
            imagined_gpu.time_us = time.time_ns() // 1000
            imagined_gpu.free(workspace)
            time.sleep(0.002)
        time.sleep(0.002)
        between = malloc_now(imagined_gpu, 7)  # belongs to no step
    assert imagined_gpu.is_recorded
    trace.stop()
    assert kept != between and not imagined_gpu.is_recorded
    step = trace.last("train step")
    # 1,000 and 7 bytes of the first step; the second adds 1,000, and 50 for a while. The work space came before.
    assert step.curve.allocated_bytes == (1_007, 2_007, 2_057, 2_007)
    assert (step.curve.held_bytes, step.curve.peak_bytes) == (2_007, 2_057)
    assert step.reserved_bytes == imagined_gpu.reserved_bytes == (20 + 2) * MIB


def test_on_the_cpu_nothing_is_reserved():
    trace = MemoryTrace(torch.device("cpu"))
    trace.start()
    trace.stop()
    assert trace.whole().reserved_bytes is None


def test_a_gpu_catches_up_at_both_ends_of_a_phase(monkeypatch):
    """Else a phase ends when its last kernel has been launched."""
    happened = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("caught up"))
    with CollectiveTrace():
        with record_function("forward"):
            happened.append("forward")
            torch.ones(1)
    assert happened == ["caught up", "forward", "caught up"]
