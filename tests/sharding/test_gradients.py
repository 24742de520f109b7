"""Gradients over ranks: added up and rounded, they are those of one process with one large batch."""

import pytest
import torch
import workers_for_tests as workers
from runs import Runs, mostly_long
from torch import nn

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import RunRecord
from fsdp_helpers.training.loop import add_up_gradients

PAIRS = [("ddp", "fsdp2")] + [(strategy, api) for strategy in ("fsdp", "fsdp-auto-wrap") for api in ("fsdp1", "fsdp2")]
SHARDED_UNITS = PAIRS[3:]
P_BLOCK = 49_984

# Of DDP three, so that the first part, the middle and the last all differ. Of sharded units two: a part more costs
# seconds of tracing, and whether it is the last is decided in the same place for all strategies.
PARTS = {"ddp": 3, "fsdp": 2, "fsdp-auto-wrap": 2}
ONCE = {"micro_batches": 2, "sync_micro_batches": False}
KEEPING = {"reshard_after_forward": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Runs:
    """Runs of "vit", without dropout, on the digits."""
    always = {"model": "vit", "min_num_params": 40_000, "max_steps": 3, "global_batch_size": 24, "dropout": False}
    always |= {"test_images": 12, "data_dir": str(tmp_path_factory.mktemp("no-mnist"))}
    return Runs(**always)


def counts(record: RunRecord) -> dict[str, int]:
    return {seen.op: seen.count for seen in record.ranks[0].collectives}


# ---------------------------------------------------------------- accumulation


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("strategy, api", mostly_long(PAIRS, telling=(0, 3, 4)))
def test_micro_batches_equal_one_large_batch(strategy, api, sync, run):
    one_batch = run(strategy, api)
    parts = run(strategy, api, micro_batches=PARTS[strategy], sync_micro_batches=sync)
    assert parts.step_losses == pytest.approx(one_batch.step_losses, abs=1e-5)
    assert parts.step_losses == pytest.approx(run("local", world_size=1).step_losses, abs=1e-5)


@pytest.mark.parametrize("strategy, api", SHARDED_UNITS)
def test_reduced_once_or_after_every_part(strategy, api, run):
    held, each = (run(strategy, api, micro_batches=2, sync_micro_batches=sync) for sync in (False, True))
    # five units, the root gathered once and the blocks twice in either part
    assert counts(held)["reduce_scatter"] == 5
    assert counts(each)["reduce_scatter"] == 2 * 5
    assert counts(held)["all_gather"] == counts(each)["all_gather"] == 2 * 9
    # the price of fewer collectives: whole gradients of the four blocks instead of shards
    assert held.ranks[0].peak_bytes > each.ranks[0].peak_bytes + 4 * P_BLOCK


def test_every_part_gathers_again_unless_units_stay_whole_in_forward(run):
    """Five units, gathered once a part in forward; the four below the root once more in backward."""
    one, parts, kept = (run("fsdp-auto-wrap", **how) for how in ({}, ONCE, ONCE | KEEPING))
    assert [counts(record)["all_gather"] for record in (one, parts, kept)] == [5 + 4, 2 * (5 + 4), 2 * 5]
    assert kept.step_losses == parts.step_losses
    assert counts(kept)["reduce_scatter"] == 5


def test_fsdp1_has_both_in_one(run):
    usual, kept = (run("fsdp-auto-wrap", "fsdp1", **ONCE, sharding=how) for how in ("full", "grad-op"))
    assert [counts(record)["all_gather"] for record in (usual, kept)] == [2 * 9, 5]
    assert kept.step_losses == usual.step_losses


def test_ddp_reduces_once_or_after_every_part(run):
    held, each = (run("ddp", micro_batches=3, sync_micro_batches=sync) for sync in (False, True))
    assert counts(each)["all_reduce"] == 3 * counts(held)["all_reduce"]


def test_gradients_that_lie_in_ddps_buckets_add_up_too(run):
    lean, usual = (run("ddp", micro_batches=3, bucket_view=view) for view in (True, False))
    assert lean.step_losses == usual.step_losses
    assert counts(lean) == counts(usual)


def test_within_the_block_a_gradient_is_the_ranks_own():
    own, reduced = zip(*launch(workers.gradients_held_back, world_size=2, device="cpu"), strict=True)
    assert own == (1.0, 2.0)  # rank + 1
    # with a second backward the ranks have 1 + 1 and 2 + 2; the mean is 3
    assert reduced == (3.0, 3.0)


def test_add_up_gradients_returns_the_mean_loss():
    model = nn.Linear(1, 2, bias=False)
    images, labels = torch.tensor([[1.0], [3.0], [-2.0], [0.5]]), torch.tensor([0, 1, 1, 0])
    whole = add_up_gradients(model, images, labels)
    gradient, model.weight.grad = model.weight.grad, None
    parts = add_up_gradients(model, images, labels, micro_batches=2)
    assert parts.item() == pytest.approx(whole.item(), abs=1e-6)
    assert torch.allclose(model.weight.grad, gradient)
    with pytest.raises(AssertionError, match="4 images aren't divisible by 3 micro-batches"):
        add_up_gradients(model, images, labels, micro_batches=3)


# ---------------------------------------------------------------- bf16


@pytest.mark.parametrize("strategy, api", SHARDED_UNITS)
def test_bf16_gathers_half_and_reduces_in_fp32(strategy, api, run):
    fp32, bf16 = (run(strategy, api, precision=precision).ranks[0] for precision in ("fp32", "bf16"))
    moved = [{seen.op: seen.bytes for seen in rank.collectives} for rank in (fp32, bf16)]
    assert moved[1]["all_gather"] == moved[0]["all_gather"] / 2
    assert moved[1]["reduce_scatter"] == moved[0]["reduce_scatter"]
    # shards, gradients and moments stay in fp32
    assert (bf16.parameter_bytes, bf16.gradient_bytes, bf16.optimizer_bytes) == (
        fp32.parameter_bytes,
        fp32.gradient_bytes,
        fp32.optimizer_bytes,
    )
