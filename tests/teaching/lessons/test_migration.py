"""The two listings are the same training, and the table has every argument."""

import inspect

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import migration


@pytest.fixture
def config(digits_dir) -> TrainConfig:
    return TrainConfig(model="vit-mnist", global_batch_size=8, max_steps=3, data_dir=str(digits_dir))


def test_every_argument_is_mapped():
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self"}
    assert {old.partition("=")[0] for old, _, _ in migration.ARGUMENTS} == arguments


def test_both_trainings_have_the_same_gradients(config):
    norms = launch(migration.norms_by_both, config, world_size=2, device="cpu", progress=False)[0]
    assert len(norms["FSDP1"]) == config.max_steps
    assert norms["FSDP2"] == pytest.approx(norms["FSDP1"], rel=0.01)  # bf16 has three digits


def test_the_listings_are_narrow_enough_to_stand_side_by_side():
    lines = [
        line
        for train in (migration.train_with_fsdp1, migration.train_with_fsdp2)
        for line in inspect.getsource(train).splitlines()
    ]
    assert max(map(len, lines)) <= 70
