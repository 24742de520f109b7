"""What a rank holds between steps, worked by hand."""

import pytest

from fsdp_helpers.config import STRATEGIES
from fsdp_helpers.planning.state import held_bytes, num_shards


def test_held_bytes_hand_worked():
    # 1,000,000 parameters: 16 MB of state; DDP's buckets 4 MB more, unless they are the gradients
    assert held_bytes("local", 1_000_000, 1) == 16_000_000
    assert held_bytes("ddp", 1_000_000, 4) == 20_000_000
    assert held_bytes("ddp", 1_000_000, 4, bucket_view=True) == 16_000_000
    # over 4 ranks 16 / 4 = 4 MB; on one rank a shard is the whole
    assert {held_bytes(name, 1_000_000, 4) for name in STRATEGIES if name not in ("local", "ddp")} == {4_000_000}
    assert held_bytes("fsdp", 1_000_000, 1) == 16_000_000


@pytest.mark.parametrize("name", ["fsdp2", "FSDP", "zero", ""])
def test_an_unknown_strategy_is_no_sharded_one(name):
    with pytest.raises(ValueError, match=f"unknown strategy '{name}'; choose one of local, ddp, fsdp"):
        held_bytes(name, 1_000_000, 4)


def test_ranks_that_share_one_copy():
    assert [num_shards(sharding, 8) for sharding in ("full", "grad-op", "hybrid", "none")] == [8, 8, 4, 1]
