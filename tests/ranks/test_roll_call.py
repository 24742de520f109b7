"""Ranks that wait in vain, and name whom they wait for."""

import pytest
import workers_for_tests as workers

from fsdp_helpers.ranks import roll_call
from fsdp_helpers.ranks.launch import RankError, launch


@pytest.mark.parametrize("timeout_s, expected_s", [(1800.0, 5.0), (8.0, 2.0), (1.0, 0.25)])
def test_the_roll_call_takes_a_quarter_and_at_most_five_seconds(timeout_s, expected_s):
    assert roll_call.roll_call_s(timeout_s) == expected_s


@pytest.mark.parametrize("sharding", [None, "hybrid"])
def test_a_rank_that_is_stopped_is_named(sharding):
    """Also where it is missed in a group of two of the four ranks."""
    with pytest.raises(RankError, match="rank 1 did not answer within 4 s") as error:
        launch(workers.stop_rank_1, sharding, world_size=4, device="cpu", group_timeout_s=4.0, timeout_s=60)
    assert error.value.rank != 1


def test_a_rank_that_is_late_fails_nobody():
    """It comes within the time-out."""
    assert launch(workers.all_reduce_late, 1.0, world_size=2, device="cpu", group_timeout_s=30.0) == [2.0, 2.0]


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_a_time_out_that_is_none_is_refused(timeout_s):
    with pytest.raises(ValueError, match="it must be a number of seconds above 0"):
        launch(workers.return_rank, world_size=1, group_timeout_s=timeout_s)
