"""What a run costs, worked by hand: how often to save, and the hours of its devices."""

from dataclasses import replace

import pytest

from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.costs import device_hours, save_plan
from fsdp_helpers.planning.models import llama_subject, named_subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.planning.step_time import StepTime

TINY = LlamaShape(width=8, depth=2, num_heads=4, num_kv_heads=2, mlp_width=12, vocabulary=10, context=4)
SECONDS = {"arithmetic_s": 1.5, "communication_s": 1.0, "optimizer_s": 0.0, "shortest_s": 1.5, "longest_s": 3.0}


def planned(world_size: int = 16, **settings) -> Plan:
    cluster = Cluster(world_size=world_size, device_memory_bytes=1e9, ranks_per_node=8)
    return make_plan(named_subject("vit-mnist"), Settings(**{"batch": 8} | settings), cluster)


def test_a_checkpoint_is_written_by_all_nodes_and_saved_as_often_as_loses_least():
    plan = replace(planned(), checkpoint_bytes=40 * 10**9)
    # Two nodes write 20 GB each at 2 GB/s: 10 s. A failure of one of 16 devices every 384 / 16 = 24 h, 86,400 s.
    saving = save_plan(plan, device_hours_between_failures=384, storage_bytes_per_s=2e9, restart_s=0)
    assert (saving.checkpoint_bytes, saving.save_s, saving.hours_between_failures) == (40 * 10**9, 10, 24)
    # The root of 2 x 10 x 86,400 is 1,314.5: saving takes 10 of them, and a failure loses half of them, 0.76 % each.
    assert saving.every_s == pytest.approx(1_314.534, abs=1e-3)
    assert saving.lost_share == pytest.approx(2 * 10 / 1_314.534, rel=1e-5)
    # and a restart, in which nothing is learned, its part of the 86,400 s
    known = {"device_hours_between_failures": 384, "storage_bytes_per_s": 2e9}
    assert save_plan(plan, **known, restart_s=864).lost_share == pytest.approx(saving.lost_share + 0.01)
    # A node that is not full writes too: three for 17 ranks
    plan = replace(planned(17), checkpoint_bytes=48 * 10**9)
    assert save_plan(plan, storage_bytes_per_s=2e9).save_s == 8


@pytest.mark.parametrize(
    "settings, value_bytes",
    [
        ({}, 12),  # a parameter and two moments in fp32
        ({"precision": "bf16"}, 12),  # computed in bf16, kept in fp32
        ({"precision": "pure-bf16"}, 6),
        ({"optimizer": "sgd-momentum"}, 8),
    ],
)
def test_a_checkpoint_has_what_the_next_step_needs(settings, value_bytes):
    plan = planned(**settings)
    assert save_plan(plan, storage_bytes_per_s=1e9).checkpoint_bytes == value_bytes * plan.num_params


def test_frozen_values_are_saved_without_moments_and_not_updated():
    subject = llama_subject("tiny", TINY, lora_rank=2)
    cluster = Cluster(world_size=2, device_memory_bytes=1e9, flops_per_s=1e12, memory_bytes_per_s=1e9)
    plan = make_plan(subject, Settings(batch=4), cluster)
    # In each of two blocks rank 2 x (in + out) of 7 matrices: q and out 8 + 8, k and v 8 + 4, gate, up and down 8 + 12
    num_trained = 2 * 2 * (2 * 16 + 2 * 12 + 3 * 20)
    assert plan.checkpoint_bytes == 4 * plan.num_params + 8 * num_trained
    # An update reads parameters and gradients and writes parameters, 12 bytes; it reads and writes two moments, 16
    assert plan.time.optimizer_s == pytest.approx(28 * num_trained / 2 / 1e9)


def test_hours_are_those_of_all_devices():
    plan = replace(planned(), time=StepTime(**SECONDS, estimate_s=2.0, spans=()))
    # 16 x 8 images in 2 s: 64 a second, 2,304,000 in ten hours of 16 devices
    assert device_hours(plan, 2_304_000) == pytest.approx(160)
    assert device_hours(plan, 2_304_000, goodput=0.8) == pytest.approx(200)
    with pytest.raises(ValueError, match="goodput is 1.2"):
        device_hours(plan, 1, goodput=1.2)
    with pytest.raises(ValueError, match="GPU-hours need a rate"):
        device_hours(planned(), 2_304_000)
