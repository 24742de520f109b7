"""All strategies compute the same; what they keep, hold, send and need at the peak is what arithmetic says."""

from dataclasses import replace
from functools import wraps

import pytest
import torch
from runs import Runs, mostly_long
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from fsdp_helpers.config import APIS, STRATEGIES, TrainConfig, is_sharded
from fsdp_helpers.measuring.rank_of_n import fake_group
from fsdp_helpers.models.series import build_model
from fsdp_helpers.planning.traffic import padded_params, ring_sent_bytes
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import RankRecord, RunRecord
from fsdp_helpers.sharding import strategies
from fsdp_helpers.sharding.strategies import APPLY_STRATEGY
from fsdp_helpers.sharding.wrapping import choose_units, size_policy
from fsdp_helpers.training.worker import train_worker

P_SHALLOW = 1_199_882
P_ROOT = 18_816 + 1_290  # at threshold 20,000 the convolutions and the last layer stay with the root

PAIRS = [(strategy, api) for strategy in STRATEGIES if is_sharded(strategy) for api in APIS]
SHARDED = [pair for pair in PAIRS if pair != ("fsdp-offload", "fsdp1")]  # which needs a GPU
ONE_UNIT, AUTO_WRAP = SHARDED[:2], SHARDED[2:4]
# Two ranks with 32 images each: enough that activations count. The others are here for their losses.
BATCH_SIZES = {1: 64, 2: 64, 3: 24, 4: 24}
# Enough for a steady step. Two and three ranks train some more for their losses.
LENGTHS = {1: {"max_steps": 3}, 2: {}, 3: {}, 4: {"max_steps": 3}}


VIT = {"model": "vit", "max_steps": 2, "global_batch_size": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs on the digits."""
    runs = Runs(test_images=12, max_steps=5, data_dir=str(tmp_path_factory.mktemp("no-mnist")))

    def run(strategy: str, api: str = "fsdp2", world_size: int = 2, **settings) -> RunRecord:
        return runs(strategy, api, world_size, **{"global_batch_size": BATCH_SIZES[world_size]} | settings)

    return run


def moved(rank: RankRecord) -> dict[str, tuple[int, int]]:
    """Operation -> (how often, full-tensor bytes) in a steady step."""
    return {seen.op: (seen.count, seen.bytes) for seen in rank.collectives}


def peak(record: RunRecord) -> int:
    return max(rank.peak_bytes for rank in record.ranks)


# ---------------------------------------------------------------- the same losses, the same parameters


@pytest.mark.parametrize(
    "strategy, api, world_size",
    [(*which, 2) for which in SHARDED]
    + mostly_long([(*which, world_size) for world_size in (3, 4) for which in SHARDED], telling=(3,)),
)
def test_equals_ddp_step_by_step(strategy, api, world_size, run):
    ddp, sharded = run("ddp", world_size=world_size), run(strategy, api, world_size)
    assert len(sharded.step_losses) == 5
    assert sharded.step_losses == pytest.approx(ddp.step_losses, abs=1e-5)
    assert sharded.epochs[0].test_loss == pytest.approx(ddp.epochs[0].test_loss, abs=1e-4)


# ---------------------------------------------------------------- bytes kept and held


@pytest.mark.parametrize("strategy, api", SHARDED)
def test_two_ranks_keep_half_each(strategy, api, run):
    for rank in run(strategy, api).ranks:
        # 4 x 1,199,882 / 2 = 2,399,764; twice that for Adam's two moments
        assert (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes) == (2_399_764, 2_399_764, 4_799_528)


@pytest.mark.parametrize("strategy, api", mostly_long(SHARDED, telling=(3,)))
def test_three_ranks_together_keep_the_whole(strategy, api, run):
    ranks = run(strategy, api, 3).ranks
    assert sum(rank.parameter_bytes for rank in ranks) == 4 * P_SHALLOW
    assert sum(rank.gradient_bytes for rank in ranks) == 4 * P_SHALLOW
    assert sum(rank.optimizer_bytes for rank in ranks) == 8 * P_SHALLOW


@pytest.mark.parametrize("strategy, api", SHARDED)
def test_held_is_16_bytes_a_parameter_over_the_ranks(strategy, api, run):
    # 16 x 1,199,882 / 2 = 9,599,056, and a few bytes for step counters and losses
    for rank in run(strategy, api).ranks:
        assert rank.held_bytes == pytest.approx(9_599_056, rel=1e-3)


# ---------------------------------------------------------------- peak


@pytest.mark.parametrize("api", APIS)
def test_peaks_are_in_order(api, run):
    assert peak(run("fsdp-auto-wrap", api)) < peak(run("fsdp", api)) < peak(run("ddp"))


@pytest.mark.parametrize("strategy, api", mostly_long([("fsdp", "fsdp1"), *AUTO_WRAP], telling=(2,)))
def test_a_measurement_repeats_to_the_byte(strategy, api, run):
    first, again = run(strategy, api), run(strategy, api, max_steps=4, seed=1)
    assert [(rank.held_bytes, rank.peak_bytes) for rank in first.ranks] == [
        (rank.held_bytes, rank.peak_bytes) for rank in again.ranks
    ]


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("strategy, api", ONE_UNIT)
def test_one_unit_moves_everything_once_each_way(strategy, api, run):
    for rank in run(strategy, api).ranks:
        assert rank.num_units == 1
        assert moved(rank) == {"all_gather": (1, 4 * P_SHALLOW), "reduce_scatter": (1, 4 * P_SHALLOW)}


@pytest.mark.parametrize("strategy, api", SHARDED[2:])
def test_auto_wrap_gathers_every_unit_but_the_root_twice(strategy, api, run):
    for rank in run(strategy, api).ranks:
        # Two units, the root and fc1: gathered 2 times in forward, fc1 once more in backward
        assert rank.num_units == 2
        # 4 x 1,199,882 + 4 x (1,199,882 - 20,106) = 4,799,528 + 4,719,104 = 9,518,632
        assert moved(rank) == {"all_gather": (3, 9_518_632), "reduce_scatter": (2, 4_799_528)}


def test_a_threshold_that_nothing_reaches_leaves_one_unit(run):
    (first, second) = run("fsdp-auto-wrap", max_steps=4, min_num_params=100_000_000).ranks
    assert first.num_units == second.num_units == 1
    assert moved(first) == {"all_gather": (1, 4 * P_SHALLOW), "reduce_scatter": (1, 4 * P_SHALLOW)}


# ---------------------------------------------------------------- what a rank sends


def padded_units(api: str, world_size: int, *, wrapped: bool) -> list[int]:
    """The padded parameters of ShallowNet's units, the root first."""
    model = build_model("shallow")
    names = choose_units(model, size_policy(20_000)) if wrapped else []
    shapes = {name: [parameter.shape for parameter in model.get_submodule(name).parameters()] for name in names}
    root = [
        parameter.shape
        for name, parameter in model.named_parameters()
        if not any(name.startswith(f"{unit}.") for unit in names)
    ]
    padded = padded_params if api == "fsdp2" else flat_values
    return [padded(unit, world_size) for unit in (root, *shapes.values())]


def flat_values(shapes: list[torch.Size], world_size: int) -> int:
    """FSDP1's flat tensor: each parameter begins at a multiple of 16 bytes, 4 values, and the end is padded."""
    values = 0
    for shape in shapes:
        values += -values % 4 + shape.numel()
    return values + -values % world_size


def sent_bytes(units: list[int], num_ranks: int) -> int:
    """What a rank sends in a step: the root is gathered once, other units twice, and everything is reduced once.

    S. Rajbhandari et al. 2020, arXiv:1910.02054, section 7: 3 P with everything sharded, 2 P with one unit, as with DDP.
    """
    root, total = units[0], sum(units)
    gathered = ring_sent_bytes("all_gather", 4 * (root + 2 * (total - root)), num_ranks)
    return gathered + ring_sent_bytes("reduce_scatter", 4 * total, num_ranks)


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy, api", ONE_UNIT + AUTO_WRAP)
def test_fsdp_sends_what_the_formula_says(strategy, api, world_size, run):
    """Neither 3 nor 4 ranks divide 1,199,882 parameters, nor all numbers of rows: padding counts, to the byte."""
    units = padded_units(api, world_size, wrapped=strategy == "fsdp-auto-wrap")
    for rank in run(strategy, api, world_size, **LENGTHS[world_size]).ranks:
        assert sum(seen.sent_bytes for seen in rank.collectives) == sent_bytes(units, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ddp_sends_what_the_formula_says(world_size, run):
    for rank in run("ddp", world_size=world_size, **LENGTHS[world_size]).ranks:
        sent = sum(seen.sent_bytes for seen in rank.collectives)
        # Each bucket is rounded to whole bytes by itself
        assert abs(sent - ring_sent_bytes("all_reduce", 4 * P_SHALLOW, world_size)) < sum(
            c.count for c in rank.collectives
        )


@pytest.mark.parametrize("api", APIS)
def test_fsdp_sends_as_much_as_ddp_or_half_as_much_again(api, run):
    """1 : 1 : (3 - root / P) / 2, which is 1.4916 for ShallowNet."""
    runs = run("ddp"), run("fsdp", api), run("fsdp-auto-wrap", api)
    ddp, one_unit, units = (sum(seen.sent_bytes for seen in record.ranks[0].collectives) for record in runs)
    assert one_unit == ddp == 4_799_528
    assert units / ddp == (3 - P_ROOT / P_SHALLOW) / 2
    assert round(units / ddp, 4) == 1.4916


@pytest.mark.parametrize("api", APIS)
def test_hybrid_sends_within_its_groups(api, run):
    """Two groups of two ranks: halves within a group, and a shard's all-reduce across them. N is 2 each time, not 4."""
    units = padded_units(api, 2, wrapped=True)
    for rank in run("fsdp-auto-wrap", api, 4, sharding="hybrid", **LENGTHS[4]).ranks:
        sent = {seen.op: seen.sent_bytes for seen in rank.collectives}
        assert sent["all_gather"] + sent["reduce_scatter"] == sent_bytes(units, 2)
        assert sent["all_reduce"] == 4 * sum(units) // 2


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("api", APIS)
def test_grad_op_keeps_parameters_until_backward(api, run):
    """ZeRO-2: no second all-gather, and a higher peak, seen on four blocks of the same size."""
    full, grad_op = (run("fsdp-auto-wrap", api, sharding=sharding, **VIT) for sharding in ("full", "grad-op"))
    assert grad_op.step_losses == pytest.approx(full.step_losses, abs=1e-5)
    # The root and four blocks: 5 + 4 gathered, without freeing after forward 5
    assert [moved(record.ranks[0])["all_gather"][0] for record in (full, grad_op)] == [9, 5]
    assert moved(grad_op.ranks[0])["reduce_scatter"] == moved(full.ranks[0])["reduce_scatter"]
    assert peak(grad_op) > peak(full)


@pytest.mark.parametrize("api", APIS)
def test_hybrid_shards_within_groups_and_copies_across(api, run):
    ddp, hybrid = (
        run("ddp", world_size=4, **LENGTHS[4]),
        run("fsdp-auto-wrap", api, 4, sharding="hybrid", **LENGTHS[4]),
    )
    assert hybrid.step_losses == pytest.approx(ddp.step_losses, abs=1e-5)
    for rank in hybrid.ranks:
        # Four ranks, but two shards: 4 x 1,199,882 / 2
        assert rank.parameter_bytes == 2_399_764
        # Each shard of the gradients is summed once more, across the two groups
        assert moved(rank)["all_reduce"] == (2, 2_399_764)


def test_no_sharding_is_ddp(run):
    ddp, none = run("ddp"), run("fsdp", "fsdp1", sharding="none")
    assert none.step_losses == pytest.approx(ddp.step_losses, abs=1e-5)
    for rank in none.ranks:
        assert (rank.parameter_bytes, moved(rank)) == (4 * P_SHALLOW, {"all_reduce": (1, 4 * P_SHALLOW)})


@pytest.mark.parametrize("prefetch", mostly_long(["post", "none"]))
def test_prefetching_changes_no_number(prefetch, run):
    usual, other = (run("fsdp-auto-wrap", "fsdp1", backward_prefetch=p, **VIT) for p in ("pre", prefetch))
    assert other.step_losses == usual.step_losses
    assert moved(other.ranks[0]) == moved(usual.ranks[0])


@pytest.mark.parametrize("strategy, api", SHARDED)
def test_a_model_without_parameters_is_refused(strategy, api):
    with pytest.raises(ValueError, match="Sequential has no parameters to shard"):
        APPLY_STRATEGY[strategy](nn.Sequential(nn.ReLU()), torch.device("cpu"), TrainConfig(strategy=strategy, api=api))


@pytest.mark.parametrize(
    "strategy, policy", [("fsdp-auto-wrap", OffloadPolicy()), ("fsdp-offload", CPUOffloadPolicy(pin_memory=False))]
)
def test_every_unit_gets_the_offload_policy(strategy, policy, monkeypatch):
    """On the CPU the shards are on the host either way, and no loss or byte tells the two apart."""
    seen = []

    @wraps(fully_shard)
    def shard(module: nn.Module, **settings) -> nn.Module:
        seen.append(settings["offload_policy"])
        return fully_shard(module, **settings)

    monkeypatch.setattr(strategies, "fully_shard", shard)
    config = TrainConfig(strategy=strategy, min_num_params=20_000)
    with fake_group(2):  # one rank is enough to look at
        model = APPLY_STRATEGY[strategy](build_model("shallow"), torch.device("cpu"), config)
        assert strategies.unit_names(model) == ["root", "fc1"]
    assert seen == [policy] * 2


def test_host_memory_is_pinned_where_there_is_a_device_to_copy_to(monkeypatch):
    seen = []
    monkeypatch.setattr(strategies, "make_mesh", lambda device, config: None)
    monkeypatch.setattr(strategies, "fully_shard", lambda module, **settings: seen.append(settings["offload_policy"]))
    for device in ("cuda", "cpu"):
        APPLY_STRATEGY["fsdp-offload"](nn.Linear(2, 2), torch.device(device), TrainConfig(strategy="fsdp-offload"))
    assert seen == [CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False)]


def test_hybrid_has_two_copies_on_any_number_of_ranks():
    with fake_group(8):
        mesh = strategies.make_mesh(torch.device("cpu"), TrainConfig(strategy="fsdp", sharding="hybrid"))
        assert (tuple(mesh.shape), mesh.mesh_dim_names) == ((2, 4), ("replicate", "shard"))


def test_ddp_that_waits_for_its_buckets_learns_the_same(run, monkeypatch):
    """So it trains on CUDA under a time-out; the variable is NCCL's, and gloo does not heed it."""
    config = replace(run("ddp").config, max_steps=4)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    waited = launch(train_worker, config, world_size=2, device="cpu")[0]
    # Halves are exact in floating point, so even the order of dividing and adding up does not show.
    assert waited.step_losses == run("ddp").step_losses[:4]
    assert waited.ranks[0].collectives == run("ddp").ranks[0].collectives


def test_ddp_waits_for_its_buckets_under_a_time_out_alone(monkeypatch):
    hooks = []
    monkeypatch.setattr(strategies.DistributedDataParallel, "register_comm_hook", lambda *hook: hooks.append(hook))
    with fake_group(2):
        model = APPLY_STRATEGY["ddp"](build_model("simple"), torch.device("cpu"), TrainConfig(strategy="ddp"))
        for off in (None, "", "0"):
            if off is not None:
                monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", off)
            strategies.wait_for_buckets(model)
        assert hooks == []
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
        strategies.wait_for_buckets(build_model("simple"))
        strategies.wait_for_buckets(model)
    assert hooks == [(model, None, strategies.average_and_wait)]


def test_a_list_of_modules_is_one_unit_and_a_root_without_parameters_is_none():
    with fake_group(2):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        for pair in (model[:2], model[2:4]):
            fully_shard([*pair])
        fully_shard(model)
        assert strategies.unit_names(model) == ["root", "0", "2"] and strategies.count_units(model) == 3
        model = nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4)))
        assert strategies.unit_names(fully_shard(model)) == ["0", "1"]
