"""Plans beside runs that others published."""

import pytest

from fsdp_helpers.planning.published import PUBLISHED

WITH_MEMORY = [run for run in PUBLISHED if run.memory_bytes]


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.model}-{run.world_size}-{run.device}")
def test_throughput_lies_in_the_range(run):
    plan = run.plan()
    most, least = (speed / run.world_size for speed in plan.items_per_s)
    print(f"{run.tokens_per_s} published, {least:.0f} to {most:.0f} planned")
    assert least <= run.tokens_per_s <= most
    assert most / least <= 1.25 / 0.75 * 1.0001


@pytest.mark.parametrize("run", WITH_MEMORY, ids=lambda run: f"{run.model}-{run.world_size}")
def test_memory_within_a_tenth(run):
    assert run.plan().peak.bytes == pytest.approx(run.memory_bytes, rel=0.1)
