"""What one rank keeps, to the byte: worked by hand. Held against real ranks in `measuring/test_rank_of_n.py`."""

from dataclasses import replace

import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.own_shards import own_state, rows_of_shard
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.walk.units import num_shards

# 10 x 3 and 5 values: 35
PROFILE = StepProfile(shapes={"a.weight": (10, 3), "a.bias": (5,)}, moments=())


def own(rank: int, world_size: int, **settings) -> int:
    return own_state(PROFILE, TrainConfig(**settings), world_size, rank=rank).parameter_bytes


def test_rows_are_given_out_until_there_are_none():
    # 10 over 4: shares of 3, and the last has what is left; 5 over 4: shares of 2, 2, 1, none
    assert [rows_of_shard(10, 4, place) for place in range(4)] == [3, 3, 3, 1]
    assert [rows_of_shard(5, 4, place) for place in range(4)] == [2, 2, 1, 0]
    # On rank 0: 3 x 3 + 2 = 11 values; on rank 3: 1 x 3 + 0
    assert own(0, 4, strategy="fsdp") == 4 * 11
    assert own(3, 4, strategy="fsdp") == 4 * 3


def test_whole_copies():
    assert own(0, 1, strategy="local") == own(1, 2, strategy="ddp") == 4 * 35
    assert own(0, 1, strategy="fsdp") == 4 * 35
    # two groups of two: 10 and 5 rows over 2, 5 x 3 + 3; the second group keeps the same
    assert own(0, 4, strategy="fsdp", sharding="hybrid") == own(2, 4, strategy="fsdp", sharding="hybrid") == 4 * 18


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_all_shards_together_are_the_model(ranks):
    states = [own_state(PROFILE, TrainConfig(strategy="fsdp"), ranks, rank=rank) for rank in range(ranks)]
    assert sum(state.total_bytes for state in states) == 16 * 35


@pytest.mark.parametrize("ranks, settings", [(1, {"strategy": "local"}), (2, {"strategy": "fsdp"})])
def test_frozen_values_have_neither_gradients_nor_moments(ranks, settings):
    frozen = replace(PROFILE, frozen=frozenset({"a.weight"}))
    states = [own_state(frozen, TrainConfig(**settings), ranks, rank=rank) for rank in range(ranks)]
    assert sum(state.parameter_bytes for state in states) == 4 * 35
    assert sum(state.gradient_bytes for state in states) == 4 * 5
    assert sum(state.optimizer_bytes for state in states) == 8 * 5


def test_ranks_that_share_one_copy():
    assert [num_shards(sharding, 8) for sharding in ("full", "grad-op", "hybrid")] == [8, 8, 4]
