"""Gradients over ranks: added up, rounded and clipped, they are those of one process with one large batch."""

import pytest
import torch
import workers_for_tests as workers
from clipping_workers import clip_beside_an_ignored_parameter, clip_in_two_dimensions
from runs import Runs, mostly_long
from torch import nn

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import RunRecord
from fsdp_helpers.sharding.gradients import clip_gradients, hold_back_reduction
from fsdp_helpers.training.loop import add_up_gradients, train_step

WAYS = [("ddp", "fsdp2")] + [(strategy, api) for strategy in ("fsdp", "fsdp-auto-wrap") for api in ("fsdp1", "fsdp2")]
SHARDED_UNITS = WAYS[3:]
P_BLOCK = 49_984


TELLING = [WAYS[0], WAYS[3], WAYS[4]]
# Of DDP three, so that the first part, the middle and the last all differ. Of sharded units two: a part more costs
# seconds of tracing, and whether it is the last is decided in the same place for all strategies.
PARTS = {"ddp": 3, "fsdp": 2, "fsdp-auto-wrap": 2}
UNITS = {"strategy": "fsdp-auto-wrap"}
ONCE = {"micro_batches": 2, "sync_micro_batches": False}
LARGE = {"model": "shallow", "min_num_params": 20_000, "clip_norm": 0.5, "max_steps": 2}
KEEPING = [
    {"reshard_after_forward": False},
    {"reshard_after_backward": False},
    {"reshard_after_forward": False, "reshard_after_backward": False},
]
# They share the launch, too.
ONE_LOOKS_AT = [
    *[UNITS | ONCE | keeping for keeping in KEEPING],
    UNITS | {"micro_batches": 2},
    UNITS | ONCE | {"clip_norm": 0.5},
    UNITS | ONCE | {"api": "fsdp1", "sharding": "grad-op"},
    {"strategy": "fsdp", "api": "fsdp1", "sharding": "none", "clip_norm": 0.5},
    {"strategy": "ddp", "micro_batches": 3, "bucket_view": True},
    *[{"strategy": strategy, "api": api, "precision": "bf16"} for strategy, api in SHARDED_UNITS],
]
OF_ONE_PROCESS = [{}, {"micro_batches": 3}, {"clip_norm": 0.5}, LARGE]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Runs:
    """Runs of "vit", without dropout, on the digits."""
    always = {"model": "vit", "min_num_params": 40_000, "max_steps": 3, "global_batch_size": 24, "dropout": False}
    always |= {"test_images": 12, "data_dir": str(tmp_path_factory.mktemp("no-mnist"))}
    several_look_at = [
        {"strategy": strategy, "api": api} | settings
        for strategy, api in TELLING
        for settings in (
            {},
            {"micro_batches": PARTS[strategy], "sync_micro_batches": False},
            {"micro_batches": PARTS[strategy], "sync_micro_batches": True},
            {"clip_norm": 0.5},
        )
    ]
    one_process = [{"strategy": "local", "api": "fsdp2"} | settings for settings in OF_ONE_PROCESS]
    one_process.append(UNITS | {"clip_norm": 0.5})
    return Runs(always, [(2, run) for run in several_look_at + ONE_LOOKS_AT] + [(1, run) for run in one_process])


def counts(record: RunRecord) -> dict[str, int]:
    return {seen.op: seen.count for seen in record.ranks[0].collectives}


# ---------------------------------------------------------------- accumulation


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("strategy, api", mostly_long(WAYS, telling=(0, 3, 4)))
def test_micro_batches_equal_one_large_batch(strategy, api, sync, run):
    one_batch = run(strategy, api)
    parts = run(strategy, api, micro_batches=PARTS[strategy], sync_micro_batches=sync)
    assert parts.step_losses == pytest.approx(one_batch.step_losses, abs=1e-5)
    assert parts.step_losses == pytest.approx(run("local", world_size=1).step_losses, abs=1e-5)


def test_micro_batches_of_one_process(run):
    parts = run("local", world_size=1, micro_batches=3)
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


def test_shards_are_reduced_after_every_part_unless_told_otherwise(run):
    """Five units, two parts, and no full gradients between the parts; test_config.py has the other strategies."""
    assert counts(run("fsdp-auto-wrap", micro_batches=2))["reduce_scatter"] == 2 * 5


def test_every_part_gathers_again_unless_units_stay_whole(run):
    """Five units, gathered once a part in forward; the four below the root once more in backward."""
    one, parts = run("fsdp-auto-wrap"), run("fsdp-auto-wrap", **ONCE)
    assert [counts(record)["all_gather"] for record in (one, parts)] == [5 + 4, 2 * (5 + 4)]
    kept = [run("fsdp-auto-wrap", **ONCE, **keeping) for keeping in KEEPING]
    # freed after backward only: 5 a part; after forward only: 9, then 4 for the second backward; at the end: 5
    assert [counts(record)["all_gather"] for record in kept] == [2 * 5, 9 + 4, 5]
    for record in kept:
        assert record.step_losses == parts.step_losses
        assert counts(record)["reduce_scatter"] == 5
    # the price: at the end of forward the four blocks are whole, not one
    assert kept[-1].ranks[0].peak_bytes > parts.ranks[0].peak_bytes + 4 * P_BLOCK


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


def test_one_process_has_nothing_to_hold_back():
    model = nn.Linear(1, 1, bias=False)
    with hold_back_reduction(model):
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 1.0


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


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("world_size", mostly_long([2, 3]))
@pytest.mark.parametrize("strategy, api", mostly_long(WAYS, telling=(0, 3, 4)))
def test_the_norm_is_that_of_one_process(strategy, api, world_size, run):
    one = run("local", world_size=1, clip_norm=0.5)
    many = run(strategy, api, world_size, clip_norm=0.5)
    assert len(many.gradient_norms) == 3
    assert many.gradient_norms == pytest.approx(one.gradient_norms, rel=1e-5)
    assert many.step_losses == pytest.approx(one.step_losses, abs=1e-5)
    assert min(one.gradient_norms) > 0.5  # every step was clipped


@pytest.mark.parametrize("api", mostly_long(["fsdp1", "fsdp2"], telling=(1,)))
def test_the_norm_on_one_rank_and_in_two_groups(api, run):
    one = run("local", world_size=1, clip_norm=0.5).gradient_norms
    assert run("fsdp-auto-wrap", api, 1, clip_norm=0.5).gradient_norms == pytest.approx(one, rel=1e-5)
    hybrid = run("fsdp-auto-wrap", api, 4, sharding="hybrid", clip_norm=0.5, max_steps=2)
    assert hybrid.gradient_norms == pytest.approx(one[:2], rel=1e-5)


def test_the_norm_without_sharding(run):
    one = run("local", world_size=1, clip_norm=0.5).gradient_norms
    assert run("fsdp", "fsdp1", sharding="none", clip_norm=0.5).gradient_norms == pytest.approx(one, rel=1e-5)


def test_clipping_and_micro_batches_together(run):
    one = run("local", world_size=1, clip_norm=0.5).gradient_norms
    parts = run("fsdp-auto-wrap", **ONCE, clip_norm=0.5)
    assert parts.gradient_norms == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("strategy, api", mostly_long(WAYS, telling=(4,)))
def test_the_norm_of_large_tensors(strategy, api, run):
    """ShallowNet's fc1 has a million values: squares summed in fp32 would miss the fifth digit."""
    one, many = run("local", world_size=1, **LARGE), run(strategy, api, 3, **LARGE)
    assert many.gradient_norms == pytest.approx(one.gradient_norms, rel=1e-5)


@pytest.mark.parametrize("strategy, api", mostly_long(WAYS[1:], telling=(2, 3)))
def test_the_norm_takes_one_number_over_the_ranks(strategy, api, run):
    seen = {count.op: (count.count, count.bytes) for count in run(strategy, api, clip_norm=0.5).ranks[0].collectives}
    assert seen["all_reduce"] == (1, 8)  # one fp64 value


def test_an_ignored_parameter_counts_once():
    """Also as the first of the model."""
    for plain, sharded in launch(clip_beside_an_ignored_parameter, world_size=2, device="cpu"):
        assert sharded == pytest.approx(plain, rel=1e-6)


def test_clipping_in_two_dimensions_finds_the_norm_of_one_process(capfd):
    """By the package; torch's function cannot, as 15 shows."""
    for (one, _), (norm, afterward) in launch(clip_in_two_dimensions, 0.1, world_size=4, device="cpu"):
        assert norm == pytest.approx(one, rel=1e-5)
        assert afterward == pytest.approx(0.1, rel=1e-4)
    said = capfd.readouterr().err
    assert "Warning" not in said and "suboptimal" not in said


def test_no_norms_where_nothing_is_clipped(run):
    assert run("ddp").gradient_norms == ()


def test_clip_gradients_hand_worked():
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    # norm 5; scaled down to 1: 0.6 and 0.8
    assert clip_gradients(model, 1.0).item() == 5.0
    assert model.weight.grad.flatten().tolist() == pytest.approx([0.6, 0.8], abs=1e-5)
    assert clip_gradients(model, 10.0).item() == pytest.approx(1.0, abs=1e-5)  # below the limit: left as it is
    assert model.weight.grad.flatten().tolist() == pytest.approx([0.6, 0.8], abs=1e-5)


def test_the_norm_is_summed_in_fp64():
    model = nn.Linear(4_000_000, 1, bias=False)
    model.weight.grad = torch.full_like(model.weight, 0.1)
    # 4,000,000 values of 0.1: sqrt(4,000,000) x 0.1 = 200
    assert clip_gradients(model, 1.0).item() == pytest.approx(200.0, rel=1e-6)


def test_a_step_clips_before_the_update():
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    train_step(model, torch.tensor([[2.0]]), torch.tensor([0]), optimizer, clip_norm=0.1, norms=norms)
    # both classes 1/2: the gradient is (-1, 1), its norm sqrt(2); the step has the length 0.1
    assert norms[0].item() == pytest.approx(2**0.5, rel=1e-6)
    assert model.weight.norm().item() == pytest.approx(0.1, rel=1e-4)


# ---------------------------------------------------------------- bf16


@pytest.mark.long
@pytest.mark.parametrize("strategy, api", SHARDED_UNITS)
def test_bf16_learns_what_fp32_learns(strategy, api, run):
    settings = {"max_steps": 100, "epochs": 5, "global_batch_size": 32, "learning_rate": 3e-4, "test_images": 360}
    fp32, bf16 = run("ddp", **settings), run(strategy, api, precision="bf16", **settings)
    assert len(bf16.step_losses) == 100
    assert fp32.step_losses[-1] < 0.5 * fp32.step_losses[0]  # it learns
    for loss in (lambda record: record.step_losses[-1], lambda record: record.epochs[-1].test_loss):
        print(f"{strategy} {api}: fp32 {loss(fp32):.5f}, bf16 {loss(bf16):.5f}, ratio {loss(bf16) / loss(fp32):.4f}")
        assert loss(bf16) == pytest.approx(loss(fp32), rel=0.02)
    assert bf16.step_losses != fp32.step_losses  # it is another arithmetic


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
