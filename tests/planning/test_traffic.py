"""What a rank sends: worked by hand. Held against real runs in `sharding/test_strategies.py`."""

import pytest

from fsdp_helpers.planning.traffic import (
    padded_params,
    ring_sent_bytes,
    step_range_s,
)

# Parameters of ShallowNet's root and of all its units at threshold 20,000
SHALLOW = (20_106, 1_179_776)


@pytest.mark.parametrize("num_ranks, all_reduce, half", [(1, 0, 0), (2, 1200, 600), (3, 1600, 800), (4, 1800, 900)])
def test_a_ring_hand_worked(num_ranks, all_reduce, half):
    # 1,200 bytes: 2 (N - 1) / N of them for the whole, (N - 1) / N for either half
    assert ring_sent_bytes("all_reduce", 1200, num_ranks) == all_reduce
    assert ring_sent_bytes("reduce_scatter", 1200, num_ranks) == half
    assert ring_sent_bytes("all_gather", 1200, num_ranks) == half


def test_rounded_to_whole_bytes():
    # 4 x 7 / 3 = 9.33; 4 x 8 / 3 = 10.67
    assert [ring_sent_bytes("all_reduce", size, 3) for size in (7, 8)] == [9, 11]


def test_one_rank_sends_the_others_receive():
    assert [ring_sent_bytes("broadcast", 1200, 4, is_root=root) for root in (True, False)] == [1200, 0]
    assert [ring_sent_bytes("scatter", 1200, 4, is_root=root) for root in (True, False)] == [900, 0]
    assert [ring_sent_bytes("gather", 1200, 4, is_root=root) for root in (True, False)] == [0, 300]
    assert [ring_sent_bytes("reduce", 1200, 4, is_root=root) for root in (True, False)] == [0, 1200]
    assert [ring_sent_bytes(op, 1200, 4) for op in ("send", "recv", "barrier")] == [1200, 0, 0]


def test_an_unknown_operation_is_refused():
    with pytest.raises(
        ValueError, match="the bytes that 'all_reduced' sends; choose one of all_reduce, reduce_scatter"
    ):
        ring_sent_bytes("all_reduced", 1200, 2)


def test_padding_hand_worked():
    shapes = [(2, 3), (2,), (5,)]  # 6, 2 and 5 values
    # rows filled to a multiple of N. N = 2: 2 x 3 + 2 + 6; N = 3: 3 x 3 + 3 + 6; N = 4: 4 x 3 + 4 + 8
    assert [padded_params(shapes, ranks) for ranks in (1, 2, 3, 4)] == [13, 14, 18, 24]


def test_the_shortest_and_the_longest_step():
    # nothing hidden takes 1.25 s, and at rates a quarter lower 1.25 / 0.75
    assert step_range_s(0.25, 1.0) == step_range_s(1.0, 0.25) == (1.0, 1.25 / 0.75)
