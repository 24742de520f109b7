"""A trace of memory on CUDA, from the history of an allocator: nothing here needs a GPU."""

import time

import pytest
import torch
from torch.profiler import record_function

from fsdp_helpers.measuring.collectives import CollectiveTrace
from fsdp_helpers.measuring.memory import MemoryTrace, requested_points

MIB = 2**20


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


class Allocator:
    """What `torch.cuda.memory._snapshot()["device_traces"]` has of one device, with a clock that tells Unix time."""

    def __init__(self) -> None:
        self.noted, self.sizes, self.is_recorded = [], [], None

    def note(self, action: str, address: int) -> None:
        noted = {"action": action, "addr": address, "size": self.sizes[address], "time_us": time.time_ns() // 1000}
        self.noted.append(noted)
        time.sleep(0.002)  # more than clocks may be apart

    def malloc(self, size: int) -> int:
        self.sizes.append(size)
        self.note("alloc", len(self.sizes) - 1)
        return len(self.sizes) - 1

    def record(self, enabled, **_) -> None:
        self.is_recorded = enabled is not None
        if enabled:
            self.noted.clear()


@pytest.fixture
def simulated_gpu(monkeypatch):
    """torch.cuda as a memory trace sees it."""
    gpu = Allocator()
    monkeypatch.setattr("fsdp_helpers.measuring.memory.take_work_spaces", lambda device: gpu.malloc(8 * MIB))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", gpu.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [gpu.noted]})
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 22 * MIB)
    return gpu


def test_a_step_on_cuda_is_found_in_the_allocators_history(simulated_gpu):
    """The phases come from the profiler and the bytes from the allocator: both have to tell the same time."""
    trace = MemoryTrace(torch.device("cuda", 0))
    trace.start()
    for _ in range(2):
        with record_function("train step"):
            time.sleep(0.002)
            simulated_gpu.malloc(1_000)
            simulated_gpu.note("free_requested", simulated_gpu.malloc(50))
        time.sleep(0.002)
        simulated_gpu.malloc(7)  # belongs to no step
    assert simulated_gpu.is_recorded
    trace.stop()
    assert not simulated_gpu.is_recorded
    step = trace.last("train step")
    # 1,000 and 7 bytes of the first step; the second adds 1,000, and 50 for a while. The work space came before.
    assert step.curve.allocated_bytes == (1_007, 2_007, 2_057, 2_007)
    assert (step.curve.held_bytes, step.curve.peak_bytes) == (2_007, 2_057)
    assert step.reserved_bytes == 22 * MIB


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
