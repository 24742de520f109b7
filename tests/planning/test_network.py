"""Links worked out by hand: within a node, between nodes, and across copies."""

import pytest

from fsdp_helpers.planning.network import Network

# 4 ranks in a node; 100 bytes/s within it, 10 bytes/s for each rank out of it; no latency
PLAIN = Network(
    between_bytes_per_s=10,
    within_bytes_per_s=100,
    ranks_per_node=4,
    within_latency_s=0,
    between_latency_s=0,
    start_s=0,
)


def test_within_a_node_the_fast_links_count():
    # 3/4 of 400 bytes at 100 bytes/s
    assert PLAIN.seconds("all_gather", 400, 4) == 3.0
    assert PLAIN.seconds("all_reduce", 400, 4) == 6.0


def test_between_nodes_all_links_of_a_node_carry_a_ring_each():
    # 7/8 of 800 bytes at 4 x 10 bytes/s
    assert PLAIN.seconds("reduce_scatter", 800, 8) == 17.5


def test_copies_lie_in_different_nodes_and_share_its_links():
    # 2 copies, 4 ranks apart: each rank has its own link, 1/2 x 2 x 100 bytes at 10 bytes/s
    assert PLAIN.seconds("all_reduce", 100, 2, stride=4) == 10.0
    # 2 ranks apart, both lie within the node
    assert PLAIN.seconds("all_reduce", 100, 2, stride=2) == 1.0


def test_latency_counts_hops():
    slow = Network(between_bytes_per_s=1e12, ranks_per_node=4, within_latency_s=1, between_latency_s=10, start_s=100)
    # 8 ranks in 2 nodes: 7 steps, one of them between nodes; a start of 100
    assert slow.seconds("all_gather", 8, 8) == pytest.approx(100 + 6 * 1 + 1 * 10)
    assert slow.seconds("all_reduce", 8, 8) == pytest.approx(100 + 2 * (6 * 1 + 1 * 10))


def test_nothing_is_sent_alone():
    assert PLAIN.seconds("all_gather", 400, 1) == PLAIN.seconds("all_reduce", 0, 4) == 0.0


def test_gloo_reduces_by_an_all_reduce():
    gloo = Network(between_bytes_per_s=10, start_s=0, between_latency_s=0, sums_twice=True)
    assert gloo.seconds("reduce_scatter", 100, 2) == gloo.seconds("all_reduce", 100, 2) == 10.0
