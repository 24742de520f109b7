"""Seconds of a step, worked out by hand, and held against runs over slow links."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.network import Network
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.planning.step_time import Speed, flops_by_unit, time_step
from fsdp_helpers.planning.transformer import BlockBytes, stack_profile

BLOCK = BlockBytes(kept_bytes=0, input_bytes=0, products_bytes=0, working_bytes=0)
# Two blocks of 1,000 values and a root of 16
PROFILE = stack_profile(["a", "b"], {"weight": (1_000,)}, {"root": (16,)}, BLOCK)
LINK = Network(between_bytes_per_s=1_000, start_s=0, between_latency_s=0)
SPEED = Speed(flops_per_s=1_000, network=LINK, shards=2, replicas=1)
FLOPS = {"a": 10_000, "b": 10_000}
RECORD = Path(__file__).parents[2] / "notebooks/reference/bandwidth.json"


def timed(speed: Speed = SPEED, ranks: int = 2, parts: int = 1, has_host: bool = False, **changes):
    config = TrainConfig(**({"strategy": "fsdp-auto-wrap", "micro_batches": parts} | changes))
    replicas = speed.replicas if config.sharding == "hybrid" else None
    step = walk_step(PROFILE, config, ranks, ["a", "b"], backend="nccl", replicas=replicas, has_host=has_host)
    return time_step(step, FLOPS, speed, backward_factor=2, parts=parts)


def test_gathers_hide_behind_arithmetic():
    time = timed()
    # Forward 10 s a block, backward 20; a gather sends 2,000 bytes, 2 s, and so does a reduction; the root's take 32 ms
    assert (time.arithmetic_s, time.communication_s) == (60.0, pytest.approx(6 * 2 + 2 * 0.032))
    # Exposed: the root's gather and a's; b's for backward, since the root has nothing to compute before it; at the end
    # a's reduction and the root's
    assert time.exposed_s == pytest.approx(0.032 + 2 + 2 + 2 + 0.032)
    assert time.estimate_s == pytest.approx(66.064)


def test_the_range_goes_from_all_hidden_to_nothing_hidden():
    time = timed()
    assert (time.shortest_s, time.longest_s) == (60.0, pytest.approx(72.064 / 0.75))
    named = timed(replace(SPEED, spread=0.25))
    assert (named.shortest_s, named.longest_s) == (named.estimate_s / 1.25, named.estimate_s / 0.75)


def test_the_optimizer_comes_last():
    assert timed(replace(SPEED, optimizer_s=5.0)).estimate_s == pytest.approx(71.064)


def test_micro_batches_compute_as_often():
    assert timed(parts=2).arithmetic_s == pytest.approx(120.0)


def test_ddp_sends_what_is_finished_while_it_computes_the_rest():
    time = timed(replace(SPEED, shards=1, replicas=2), strategy="ddp")
    # everything is one bucket, sent when the last gradient is there: 2 x 1/2 x 8,064 bytes
    assert time.arithmetic_s == pytest.approx(60.0)
    assert time.exposed_s == pytest.approx(8.064)


def test_hybrid_has_two_rings():
    network = replace(LINK, within_bytes_per_s=1e9, ranks_per_node=2, between_bytes_per_s=1_000)
    time = timed(replace(SPEED, network=network, shards=2, replicas=2), ranks=4, sharding="hybrid")
    # Gathers stay inside and take no time; each block's shard, 2,000 bytes, is added up over two copies in 2 s
    assert time.communication_s == pytest.approx(2 * 2 + 0.032, rel=1e-3)


def test_offloading_costs_its_link():
    offloaded = timed(replace(SPEED, host_bytes_per_s=1_000), strategy="fsdp-offload", has_host=True)
    # a shard of a block, 2,000 bytes, comes with each of four gathers and goes with each of two reductions
    assert offloaded.communication_s == pytest.approx(timed().communication_s + 6 * 2 + 2 * 0.032)
    # Half the bytes are gathered in bf16, but shards of 4 bytes a value are copied all the same
    halves = timed(replace(SPEED, host_bytes_per_s=1_000), strategy="fsdp-offload", has_host=True, precision="bf16")
    assert offloaded.communication_s - halves.communication_s == pytest.approx(4 * 1 + 0.016)


def test_a_single_rank_waits_for_each_copy_from_the_host():
    alone = replace(SPEED, shards=1, host_bytes_per_s=1_000)
    time = timed(alone, ranks=1, strategy="fsdp-offload", has_host=True)
    # 4 s a block, in forward and in backward, and the root's 64 ms once; b's gradient goes back while a computes, and
    # a's and the root's at the end
    assert time.communication_s == pytest.approx(4 * 4 + 0.064 + 2 * 4 + 0.064)
    assert time.exposed_s == pytest.approx(4 * 4 + 0.064 + 4 + 0.064)
    assert timed(alone, ranks=1).exposed_s == 0.0


def test_operations_belong_to_the_innermost_unit():
    assert flops_by_unit({"a": 1, "a.b": 2, "ab": 4, "c.d": 8}, {"", "a", "a.b"}) == {"a": 1, "a.b": 2, "": 12}


# ---------------------------------------------------------------- 10's runs, over links that were slowed down


def test_steps_over_slow_links_lie_inside_the_estimate():
    """ShallowNet under DDP on two machines: 78, 217 and 899 ms at 1,000, 200 and 50 Mbit/s."""
    unlimited, *limited = json.loads(RECORD.read_text())["rates"]
    profile = stack_profile([], {}, {"weight": (unlimited["sent_bytes"] // 4,)}, BLOCK)
    step = walk_step(profile, TrainConfig(strategy="ddp"), 2)
    for row in limited:
        # of the step that no link slowed down, a third is forward: 1 operation, and 2 in backward
        link = replace(LINK, between_bytes_per_s=row["bits_per_s"] / 8)
        speed = Speed(flops_per_s=3 / unlimited["step_s"], network=link, shards=1, replicas=2)
        time = time_step(step, {"": 1}, speed, backward_factor=2)
        print(f"{row['step_s']:.3f} s: {time.shortest_s:.3f} to {time.longest_s:.3f} s")
        assert step.sent_bytes == row["sent_bytes"]
        assert time.shortest_s < row["step_s"] < time.longest_s
    assert len(limited) == 3


def test_sharding_within_a_machine_is_as_much_faster_as_it_was():
    """ShallowNet on two machines of two ranks: full and hybrid sharding at the same bandwidth."""
    runs = {row["sharding"]: row for row in json.loads(RECORD.read_text())["shardings"]}
    cable = runs["full"]["bits_per_s"] / 8
    network = Network(between_bytes_per_s=cable / 2, within_bytes_per_s=1e9, ranks_per_node=2, sums_twice=True)
    sent = {name: row["sent_bytes"] for name, row in runs.items()}
    # what a rank sends, as full tensors among 4, 2 and 2 ranks
    full_s = sum(network.seconds(op, sent["full"][op] * 4 / 3, 4) for op in ("all_gather", "reduce_scatter"))
    hybrid_s = sum(network.seconds(op, sent["hybrid"][op] * 2, 2) for op in ("all_gather", "reduce_scatter"))
    hybrid_s += network.seconds("all_reduce", sent["hybrid"]["all_reduce"], 2, stride=2)
    alone_s = json.loads(RECORD.read_text())["rates"][0]["step_s"]
    planned = (alone_s + full_s) / (alone_s + hybrid_s)
    measured = runs["full"]["step_s"] / runs["hybrid"]["step_s"]
    print(f"full over hybrid: planned {planned:.2f}, measured {measured:.2f}")
    assert planned == pytest.approx(measured, rel=0.25)


def test_waiting_is_not_the_optimizers_time():
    assert timed(replace(SPEED, optimizer_s=5.0)).exposed_s == pytest.approx(timed().exposed_s)


def test_launches_decide_below_a_millisecond():
    assert not timed().launches_decide  # 10 s of forward for each block
    assert timed(replace(SPEED, flops_per_s=1e8)).launches_decide  # 0.1 ms
