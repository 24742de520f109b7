"""Plans, worked by hand; and what to change first."""

import json
from dataclasses import replace

import pytest

from fsdp_helpers.planning.advice import changes_until_it_fits, fastest, possible_changes, reducing_once, verdict
from fsdp_helpers.planning.models import Subject, named_subject
from fsdp_helpers.planning.plan import CATEGORIES, Cluster, Settings, make_plan
from fsdp_helpers.planning.transformer import BlockBytes, stack_profile

# Two blocks of 1,000 parameters and a root of 16; an item keeps 500 bytes of a block, 20 of them its input.
BLOCKS, PARAMS = ("a", "b"), 2_016
SHARDED = Settings(batch=20)


def profile_of(batch: int, precision: str, activation_checkpointing: str):
    half = 2 if precision == "bf16" else 1
    block = BlockBytes(
        kept_bytes=500 * batch // half,
        input_bytes=20 * batch // half,
        products_bytes=100 * batch // half,
        working_bytes=0,
    )
    return stack_profile(BLOCKS, {"weight": (1_000,)}, {"root": (16,)}, block, activation_checkpointing)


SUBJECT = Subject(
    name="two",
    item="image",
    num_params=PARAMS,
    units=BLOCKS,
    profile_of=profile_of,
    forward_flops=lambda batch: 1_000 * batch,
)


def cluster(world_size: int = 8, memory: float = 1e6, **settings) -> Cluster:
    instant = {"within_latency_s": 0, "between_latency_s": 0, "start_latency_s": 0}
    return Cluster(world_size=world_size, device_memory_bytes=memory, **{"allowance_bytes": 0} | instant | settings)


def test_a_plan_hand_worked():
    plan = make_plan(SUBJECT, SHARDED, cluster(bandwidth_bytes_per_s=1e3, flops_per_s=1e3))
    # 8 ranks: shards 4 x 2,016 / 8 = 1,008 and twice that. At the end of forward the root, 64, and b, 4,000, are
    # gathered, beside b's buffer, 4,000; two blocks of 20 images keep 20,000. Nothing else: NCCL needs no copy.
    assert plan.by_category() == {
        "parameters": 1_008,
        "gradients": 0,
        "optimizer state": 2_016,
        "unsharded units": 4_064,
        "activations": 20_000,
        "communication buffers": 4_000,
    }
    assert plan.peak.bytes == sum(plan.by_category().values()) == 31_088
    assert plan.state.total_bytes == 16 * PARAMS // 8
    # Gathered: the root once, 64, the blocks twice, 16,000; reduced: 8,064; 7/8 of each is sent
    assert {seen.op: (seen.count, seen.bytes) for seen in plan.collectives} == {
        "all_gather": (5, 16_064),
        "reduce_scatter": (3, 8_064),
    }
    assert plan.sent_bytes == (16_064 + 8_064) * 7 // 8 == 21_112
    # Three times 20,000 operations at 1,000 a second; the link takes 21.1 s
    assert (plan.arithmetic_s, plan.communication_s) == (60.0, 21.112)
    assert plan.step_s == (60.0, pytest.approx(81.112 / 0.75))
    assert plan.items_per_s == (160 / 60.0, pytest.approx(160 * 0.75 / 81.112))
    slow = make_plan(SUBJECT, SHARDED, cluster(bandwidth_bytes_per_s=100, flops_per_s=1e3))
    assert slow.step_s == (211.12, pytest.approx(271.12 / 0.75))


def test_recomputing_is_a_fourth_pass_and_keeps_inputs():
    at_a_rate = cluster(flops_per_s=1e3)
    plan = make_plan(SUBJECT, replace(SHARDED, activation_checkpointing="units"), at_a_rate)
    assert plan.arithmetic_s == 80.0
    # Backward is in a: what is kept of it is computed again, 10,000, beside what b sent
    assert (plan.by_category()["activations"], plan.peak.bytes) == (10_000, 21_588)
    # What selective checkpointing computes again is all but the products.
    assert make_plan(SUBJECT, replace(SHARDED, activation_checkpointing="selective"), at_a_rate).arithmetic_s == 60.0
    without_rate = make_plan(SUBJECT, SHARDED, cluster())
    assert (without_rate.arithmetic_s, without_rate.step_s, without_rate.items_per_s) == (None, None, None)


def test_an_update_waits_for_memory():
    # A rank updates 2,016 / 8 = 252 values: parameter read and written, gradient read, 12 bytes; two moments both, 16
    at_a_rate = cluster(flops_per_s=1e3, memory_bytes_per_s=100)
    assert make_plan(SUBJECT, SHARDED, at_a_rate).time.optimizer_s == pytest.approx(252 * 28 / 100)
    assert make_plan(SUBJECT, replace(SHARDED, optimizer="sgd"), at_a_rate).time.optimizer_s == pytest.approx(30.24)
    whole = make_plan(SUBJECT, replace(SHARDED, strategy="ddp"), at_a_rate)
    assert whole.time.optimizer_s == pytest.approx(2_016 * 28 / 100)
    # on the host at 20 GB/s, whatever the device's rate
    offloaded = make_plan(SUBJECT, replace(SHARDED, strategy="fsdp-offload"), at_a_rate)
    assert offloaded.time.optimizer_s == pytest.approx(252 * 28 / 20e9)


def test_the_share_of_the_data_sheet_leaves_out_what_is_recomputed():
    at_a_rate = cluster(flops_per_s=1e3, peak_flops_per_s=4e3)
    for settings in (SHARDED, replace(SHARDED, activation_checkpointing="units")):
        plan = make_plan(SUBJECT, settings, at_a_rate)
        # three passes of 20,000 operations
        assert plan.mfu == pytest.approx(60_000 / plan.time.estimate_s / 4e3)
    # no collective takes a noticeable time: 60 s, or 80 s with a fourth pass
    assert plan.mfu == pytest.approx(60 / 80 / 4, rel=1e-3)


def test_what_is_outside_the_count():
    plan = make_plan(SUBJECT, SHARDED, cluster(memory=36_000, allowance_bytes=4_912))
    assert (plan.needed_bytes, plan.spare_bytes, plan.fits) == (36_000, 0, True)
    assert not make_plan(SUBJECT, SHARDED, cluster(memory=35_999, allowance_bytes=4_912)).fits


def test_copies_across_groups():
    # 4 groups of 2 ranks: halves are kept, and each shard of a gradient is added up over 4 copies.
    hybrid = make_plan(SUBJECT, replace(SHARDED, sharding="hybrid", replicas=4), cluster())
    assert hybrid.state.total_bytes == 16 * PARAMS // 2
    sent = {seen.op: (seen.bytes, seen.sent_bytes) for seen in hybrid.collectives}
    assert sent["reduce_scatter"] == (8_064, 4_032)
    assert sent["all_reduce"] == (4_032, 4_032 * 6 // 4)


def test_gradients_are_reduced_once_if_they_are_held_back():
    usual, held = (replace(SHARDED, micro_batches=3, sync_micro_batches=sync) for sync in (None, False))
    plan, *plans = (make_plan(SUBJECT, settings, cluster()) for settings in (usual, held))
    assert reducing_once(plan, SUBJECT) == plans[0] and reducing_once(plans[0], SUBJECT) is None
    assert reducing_once(make_plan(SUBJECT, SHARDED, cluster()), SUBJECT) is None  # there is one part
    reduced = [seen.count for one in (plan, *plans) for seen in one.collectives if seen.op == "reduce_scatter"]
    assert reduced == [3 * 3, 3]  # two blocks and the root


def test_shards_in_host_memory():
    here = make_plan(SUBJECT, SHARDED, cluster())
    there = make_plan(SUBJECT, replace(SHARDED, strategy="fsdp-offload"), cluster())
    # Early in backward the root and b are gathered, a is in its buffer, and a's shard, 500, is on its way from the host
    assert there.peak.bytes == 64 + 4_000 + 4_000 + 500 + 20_000
    assert (here.host_bytes, there.host_bytes) == (0, 16 * PARAMS // 8)
    assert there.sent_bytes == here.sent_bytes


def test_ddp_sends_its_buckets():
    # 4 bytes x 2,016, in one bucket: 2 x 7/8 of it
    plan = make_plan(SUBJECT, Settings(batch=1, strategy="ddp"), cluster())
    assert [(seen.op, seen.count, seen.sent_bytes) for seen in plan.collectives] == [("all_reduce", 1, 14_112)]
    # A bucket is closed when it has reached its limit: the first at 1 MiB, the others at 25 MiB.
    large = named_subject("vit-b16")
    counted = make_plan(large, Settings(batch=1, strategy="ddp"), cluster()).collectives[0]
    assert counted.bytes == 4 * large.num_params and counted.count == 14


# ---------------------------------------------------------------- verdicts


def test_it_fits():
    plan = make_plan(SUBJECT, SHARDED, cluster(memory=36_088))
    assert verdict(plan, SUBJECT) == (
        "It fits: the peak of 31.1 kB and the allowance of 0 B leave 5.00 kB of a device's 36.1 kB free."
    )
    assert changes_until_it_fits(plan, SUBJECT) == []


def test_what_costs_least_comes_first():
    # 31,088 in 30,000: bf16 halves what is gathered and kept, and is the first that fits; recomputing would, too.
    plan = make_plan(SUBJECT, SHARDED, cluster(memory=30_000))
    said = verdict(plan, SUBJECT)
    assert said.startswith(
        "It doesn't fit: the peak of 31.1 kB and the allowance of 0 B exceed a device's 30.0 kB by 1.09 kB, and"
    )
    assert "the largest part is activations, 20.0 kB; first all-gather and compute in bf16" in said
    assert said.endswith("(peak 17.3 kB); then it fits.")


def test_one_change_after_the_other():
    plan = make_plan(SUBJECT, SHARDED, cluster(memory=14_000))
    changes = changes_until_it_fits(plan, SUBJECT)
    assert len(changes) > 1 and changes[-1][1].fits
    peaks = [plan.peak.bytes, *(changed.peak.bytes for _, changed in changes)]
    assert peaks == sorted(peaks, reverse=True)
    assert ", then " in verdict(plan, SUBJECT)


def test_of_changes_that_fit_the_cheapest_is_taken():
    # Recomputing, half of the batch and offloading would each do; the first costs least, though another brings more.
    plan = make_plan(SUBJECT, replace(SHARDED, precision="bf16"), cluster(memory=17_000))
    ((text, changed),) = changes_until_it_fits(plan, SUBJECT)
    others = [other.peak.bytes for _, other in possible_changes(plan, SUBJECT) if other.fits]
    assert text.startswith("recompute each block")
    assert len(others) > 1 and min(others) < changed.peak.bytes


def test_nothing_helps():
    plan = make_plan(SUBJECT, SHARDED, cluster(memory=10))
    assert not changes_until_it_fits(plan, SUBJECT)[-1][1].fits
    said = verdict(plan, SUBJECT)
    # one image is left, recomputed, so what is too large is within a layer
    assert "that's still too much, so split sequences or layers" in said and "15_more_dimensions.ipynb" in said


@pytest.mark.parametrize(
    "settings, first",
    [
        ({"strategy": "ddp"}, "shard it, with each block as a unit"),
        ({"strategy": "fsdp"}, "make each block a unit"),
        ({"sharding": "grad-op"}, "all-gather and compute in bf16"),
        ({"sharding": "grad-op", "precision": "bf16"}, "shard everything across all ranks"),
        ({"precision": "bf16"}, "recompute each block"),
        ({"precision": "bf16", "activation_checkpointing": "units"}, "halve a rank's batch to 2 image"),
        ({"precision": "bf16", "activation_checkpointing": "units", "batch": 1}, "use 8-bit moments for Adam"),
        ({"precision": "bf16", "activation_checkpointing": "units", "batch": 1, "optimizer": "sgd"}, "use 16 ranks"),
        ({"micro_batches": 2, "sync_micro_batches": False}, "reduce gradients after every micro-batch"),
    ],
)
def test_what_is_left_to_change(settings, first):
    plan = make_plan(SUBJECT, Settings(**{"batch": 4} | settings), cluster())
    assert next(possible_changes(plan, SUBJECT))[0].startswith(first)


def test_nothing_is_offered_that_is_there_already_or_cannot_be():
    def offered(settings: Settings, ranks: int) -> list[str]:
        plan = make_plan(SUBJECT, settings, cluster(ranks))
        return [text.partition(" (--")[0] for text, _ in possible_changes(plan, SUBJECT)]

    recompute, halve = "recompute each block in backward", "halve a rank's batch to 10 images"
    eight_bits = "use 8-bit moments for Adam"
    everything = ["all-gather and compute in bf16", recompute, halve, eight_bits, "use 4,096 ranks"]
    everything.append("keep shards in host memory")
    assert offered(SHARDED, 2048) == everything
    offloads = replace(SHARDED, strategy="fsdp-offload", precision="bf16")
    pure = "keep everything in bf16, which loses small updates unless they're rounded stochastically"
    assert offered(offloads, 4096) == [recompute, halve, eight_bits, pure]  # no more ranks than that
    # One process cannot shard, two can; bf16 is an honest baseline for whole models too.
    alone = ["shard it across 2 ranks, with each block as a unit", "compute in bf16", recompute, halve, eight_bits]
    assert offered(Settings(batch=20, strategy="ddp"), 1) == alone


def test_the_fastest_fits_and_of_plans_as_fast_has_the_lowest_peak():
    one = replace(SHARDED, batch=1)
    # Each step waits about as long for a slow link, so the largest batch is the fastest. 16 images need 27 kB if
    # everything is kept. If only the products are, they need 21 kB, and not one pass more.
    slow = cluster(memory=24_000, flops_per_s=1e3, bandwidth_bytes_per_s=1e3)
    best = fastest(make_plan(SUBJECT, one, slow), SUBJECT)
    assert (best.settings.batch, best.settings.activation_checkpointing, best.fits) == (16, "selective", True)
    # Where nothing waits, all with three passes are as fast as each other; one image takes the least memory.
    best = fastest(make_plan(SUBJECT, one, cluster(memory=24_000, flops_per_s=1e3)), SUBJECT)
    assert (best.settings.batch, best.settings.activation_checkpointing) == (1, "selective")
    assert fastest(make_plan(SUBJECT, one, cluster(memory=24_000)), SUBJECT) is None  # no rate is known
    assert fastest(make_plan(SUBJECT, one, cluster(memory=10, flops_per_s=1e3)), SUBJECT) is None  # nothing fits


def test_a_plan_as_json():
    plan = make_plan(SUBJECT, SHARDED, cluster())
    read = json.loads(json.dumps(plan.to_json()))
    assert read["peak"]["bytes"] == 31_088 and read["fits"] is True and read["sent_bytes"] == 21_112
    assert sum(term["bytes"] for term in read["terms"]) == 31_088
    assert set(CATEGORIES) < set(read["peak"])


# ---------------------------------------------------------------- nonsense


@pytest.mark.parametrize("value", [0, -1, 3.5, True, float("nan"), "8"])
def test_ranks_are_a_whole_number(value):
    with pytest.raises(ValueError, match="world_size is .*; it must be a whole number, 1 or more"):
        cluster(world_size=value)
    with pytest.raises(ValueError, match="batch is .*; it must be a whole number, 1 or more"):
        Settings(batch=value)


@pytest.mark.parametrize("name", ["device_memory_bytes", "bandwidth_bytes_per_s", "flops_per_s", "allowance_bytes"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "80"])
def test_bytes_and_rates_are_numbers(name, value):
    sizes = {"world_size": 1, "device_memory_bytes": 1.0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a number"):
        Cluster(**sizes)


def test_ranks_that_do_not_go_with_the_settings():
    with pytest.raises(ValueError, match="strategy 'local' trains in one process, but world_size is 8"):
        make_plan(SUBJECT, Settings(batch=1, strategy="local"), cluster())
    with pytest.raises(ValueError, match="use a multiple of 3, 6 or more"):
        make_plan(SUBJECT, Settings(batch=1, sharding="hybrid", replicas=3), cluster())
    with pytest.raises(
        ValueError, match="into 8 groups of two or more, but world_size is 8; use a multiple of 8, 16 or"
    ):
        make_plan(SUBJECT, Settings(batch=1, sharding="hybrid", replicas=8), cluster())
    with pytest.raises(ValueError, match="unknown precision 'fp8'; choose one of fp32, bf16, fp16, pure-bf16"):
        Settings(batch=1, precision="fp8")
    with pytest.raises(ValueError, match="world_size is 10,000,000,000; the planner supports at most 1,048,576 ranks"):
        cluster(10**10)


def test_a_host_that_cannot_hold_the_shards_gets_none():
    for host_memory_bytes, offered in ((1.0, False), (1e9, True)):
        plan = make_plan(SUBJECT, SHARDED, cluster(memory=10, host_memory_bytes=host_memory_bytes))
        found = [text for text, _ in changes_until_it_fits(plan, SUBJECT)]
        assert any("host memory" in text for text in found) is offered


def test_bf16_is_not_offered_to_a_device_without():
    for device, offered in (("t4", False), ("l4", True)):
        plan = make_plan(SUBJECT, SHARDED, Cluster.of(device, 8, "fp32"))
        assert any("bf16" in text for text, _ in possible_changes(plan, SUBJECT)) is offered


def test_hybrid_is_tried_where_nodes_are_far_apart():
    far = cluster(flops_per_s=1e4, bandwidth_bytes_per_s=10, within_bytes_per_s=1e6, ranks_per_node=4)
    best = fastest(make_plan(SUBJECT, replace(SHARDED, batch=1), far), SUBJECT)
    assert (best.settings.sharding, best.settings.replicas) == ("hybrid", 2)
