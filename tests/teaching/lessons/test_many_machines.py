"""What the rank functions about units find; each number is counted by hand."""

import pytest

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import many_machines

BLOCKS = [f"blocks.{number}" for number in range(4)]
BLOCK_BYTES, ROOT_BYTES = 4 * 49_984, 4 * 5_002  # of the small transformer


def on_ranks(world_size: int, worker, *args) -> list:
    return launch(worker, *args, world_size=world_size, device="cpu", timeout_s=240, progress=False)


def test_copies_that_start_apart_stay_apart():
    for found in on_ranks(4, many_machines.copies_apart):
        apart, alike = found["a seed per rank"], found["a seed per shard"]
        # The copies' gradients are averaged, so both take the same steps (rounding aside).
        assert apart["at the start"] > 0.1 and apart["after 5 steps"] == pytest.approx(apart["at the start"], rel=1e-4)
        assert set(alike.values()) == {0.0}
