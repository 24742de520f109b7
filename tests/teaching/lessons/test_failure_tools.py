"""The tools of 11 find two ranks that part: each names both sides."""

import pytest

from fsdp_helpers.ranks.launching.errors import RankError, RankTimeout
from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.teaching.lessons.failures import tools

TWO_RANKS = {"world_size": 2, "device": "cpu", "progress": False}


def test_faulthandler_writes_where_each_rank_waits(tmp_path):
    with pytest.raises(RankTimeout):
        launch(tools.write_stacks, str(tmp_path), stall_s=3, **TWO_RANKS)
    first, second = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert "in all_reduce" in first and "in all_gather" in second and "in part_ways" in first


def test_detail_names_both_sides():
    with pytest.raises(RankError, match="(?s)Detected mismatch.*ALLREDUCE.*ALLGATHER"):
        launch(tools.check_each_collective, **TWO_RANKS)


def test_the_flight_recorder_has_the_last_collective_of_each_rank():
    assert launch(tools.read_flight_recorder, **TWO_RANKS) == [("gloo:all_reduce", [[3]]), ("gloo:all_gather", [[2]])]


def test_torchs_counter_sees_units():
    assert launch(tools.count_gathers_of_a_forward, **TWO_RANKS) == [(1, 3)] * 2
