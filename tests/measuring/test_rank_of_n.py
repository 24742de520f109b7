"""One real rank of N: beside its formula on many ranks, and beside real ranks."""

import sys

import pytest
import torch
import torch.distributed as dist
from faked_ranks import fakes_ddp

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring import rank_of_n
from fsdp_helpers.measuring.rank_of_n import RankOfN, can_fake_ranks, fake_group, measure_rank_of_n, measure_this_rank
from fsdp_helpers.measuring.step_profile import measure_run, units_of
from fsdp_helpers.planning.own_shards import own_state
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.ranks.launch import launch

RUNS = {
    "DDP": {"strategy": "ddp"},
    "FSDP2": {"strategy": "fsdp"},
    "FSDP2, cut": {"strategy": "fsdp-auto-wrap"},
    "FSDP2, ZeRO-2": {"strategy": "fsdp-auto-wrap", "sharding": "grad-op"},
    "FSDP2, hybrid": {"strategy": "fsdp-auto-wrap", "sharding": "hybrid"},
}
LEVERS = {
    "bf16": {"strategy": "fsdp-auto-wrap", "precision": "bf16"},
    "checkpointed": {"strategy": "fsdp-auto-wrap", "activation_checkpointing": "units"},
}


def settings(world_size: int, **changes) -> TrainConfig:
    return TrainConfig(model="simple", min_num_params=20_000, global_batch_size=4 * world_size, **changes)


def expect_as_predicted(config: TrainConfig, found: RankOfN, *, backend: str, tolerance: float = 0.01) -> None:
    """Peak within the tolerance, state and each kind of collective to the byte."""
    profile, units = measure_run(config, found.world_size), units_of(config)
    step = walk_step(profile, config, found.world_size, units, backend=backend)
    assert found.peak_bytes == pytest.approx(step.peak.bytes, rel=tolerance)
    assert found.state == own_state(profile, config, found.world_size, rank=found.rank)
    sent = {(seen.op, seen.count, seen.bytes, seen.sent_bytes) for seen in found.collectives if seen.sent_bytes}
    assert sent == {(seen.op, seen.count, seen.bytes, seen.sent_bytes) for seen in step.collectives}
    assert found.num_units == (len(units) + 1 if config.is_sharded else 0)


@pytest.mark.parametrize("name", [pytest.param("DDP", marks=fakes_ddp), *[name for name in RUNS if name != "DDP"]])
def test_a_rank_of_64(name):
    config = settings(64, **RUNS[name])
    expect_as_predicted(config, measure_rank_of_n(config, 64), backend="fake")


@pytest.mark.parametrize("name", LEVERS)
def test_levers_on_a_rank_of_1024(name):
    config = settings(1024, **LEVERS[name])
    tolerance = 0.02 if can_fake_ranks("ddp") else 0.05  # torch 2.11 keeps more of what it recomputes
    expect_as_predicted(config, measure_rank_of_n(config, 1024), backend="fake", tolerance=tolerance)


def test_another_rank_than_the_first():
    config = settings(3, strategy="fsdp")  # 3 divides neither 64 or 10 rows: the last has less
    last, first = (measure_rank_of_n(config, 3, rank=rank) for rank in (2, 0))
    assert last.state.total_bytes < first.state.total_bytes
    assert last.peak_bytes <= first.peak_bytes  # the peak that is predicted is that of the largest shards
    expect_as_predicted(config, last, backend="fake", tolerance=1)
    expect_as_predicted(config, first, backend="fake")


@pytest.mark.parametrize("run", ["FSDP2, cut", pytest.param("DDP", marks=fakes_ddp)])
def test_real_ranks_agree(run):
    """The same function within a real group, of two processes."""
    config = settings(2, **RUNS[run])
    real = launch(measure_this_rank, config, world_size=2, device="cpu", progress=False)
    for rank in real:
        expect_as_predicted(config, rank, backend="gloo")
    alone = measure_rank_of_n(config, 2)
    assert alone.state == real[0].state and alone.sent_bytes == real[0].sent_bytes


def test_a_torch_that_cannot_fake_the_others(monkeypatch):
    monkeypatch.setattr(rank_of_n, "LIKE_THIS_ONE", "no_such_option")
    with pytest.raises(RuntimeError, match="can't fake DDP's other ranks"):
        measure_rank_of_n(settings(4, strategy="ddp"), 4)
    assert not dist.is_initialized()


# ---------------------------------------------------------------- the group


def test_a_group_is_left_again():
    with pytest.raises(ZeroDivisionError), fake_group(1024, rank=7):
        assert (dist.get_rank(), dist.get_world_size()) == (7, 1024)
        gathered = torch.zeros(1024)
        dist.all_gather_into_tensor(gathered, torch.ones(1))
        assert gathered.sum() == 1024
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_a_process_in_a_group_cannot_be_in_another():
    with fake_group(2), pytest.raises(RuntimeError, match="already in a process group"), fake_group(4):
        pass


def test_a_release_that_moved_the_fake_group(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__[:4]}.* has moved the fake process group"):
        measure_rank_of_n(settings(8, strategy="fsdp"), 8)
    assert not dist.is_initialized()


def test_what_cannot_be_measured():
    with pytest.raises(ValueError, match="micro_batches is 2, but steps are measured with only one"):
        measure_rank_of_n(settings(8, strategy="fsdp", micro_batches=2), 8)
    with pytest.raises(ValueError, match="sharding 'hybrid' needs"):
        measure_rank_of_n(settings(3, strategy="fsdp", sharding="hybrid"), 3)
