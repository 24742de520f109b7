"""FSDP1 and FSDP2 side by side, the table of arguments, and old checkpoints, Adam's moments included."""

import inspect
import re

import pytest
import torch
from chapters import read_chapter
from torch.distributed.fsdp import FullyShardedDataParallel
from workers_for_tests import with_constants

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import from_fsdp1

FEW_STEPS = {"MOVED_AT": 3, "LAST_STEP": 5}


def run(worker, *arguments, world_size: int = 2):
    arguments = (from_fsdp1.__name__, FEW_STEPS, worker, *arguments)
    return launch(with_constants, *arguments, world_size=world_size, device="cpu", timeout_s=240, progress=False)[0]


def test_both_kinds_of_checkpoint_go_on(digits_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_DATA_DIR", str(digits_dir))
    right = run(from_fsdp1.train_fsdp1, str(tmp_path))[FEW_STEPS["MOVED_AT"] :]
    one_file = from_fsdp1.write_one_file(str(tmp_path))
    assert from_fsdp1.count_twins(one_file) == (0, 55)
    damaged = 55 if torch.__version__ >= "2.15" else 0  # of the file that FSDP1 wrote itself, as 14 says
    assert from_fsdp1.count_twins(str(tmp_path / "one_file.pt")) == (damaged, 55)
    shards = run(from_fsdp1.go_on_with_fsdp2, str(tmp_path / "shards"), world_size=3)
    assert shards == pytest.approx(right, abs=1e-5)
    assert run(from_fsdp1.go_on_with_fsdp2, one_file) == pytest.approx(right, abs=1e-5)
    compared = run(from_fsdp1.compare_moments, str(tmp_path), one_file)
    assert compared == {"exp_avg": (55, 0.0), "exp_avg_sq": (55, 0.0), "step": (55, 0.0)}


@pytest.fixture
def config(digits_dir) -> TrainConfig:
    return TrainConfig(model="vit-mnist", global_batch_size=8, max_steps=3, data_dir=str(digits_dir))


def test_every_argument_is_mapped():
    arguments = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self"}
    (table,) = [cell.source for cell in read_chapter("14").cells if cell.id == "migration-table"]
    rows = re.findall(r"^\| `(\w+)(?:=\w+)?`", table, re.MULTILINE)
    assert set(rows) == arguments


def test_both_trainings_have_the_same_gradients(config):
    norms = launch(from_fsdp1.norms_by_both, config, world_size=2, device="cpu", progress=False)[0]
    assert len(norms["FSDP1"]) == config.max_steps
    assert norms["FSDP2"] == pytest.approx(norms["FSDP1"], rel=0.01)  # bf16 has three digits


def test_the_listings_are_narrow_enough_to_stand_side_by_side():
    lines = [
        line
        for train in (from_fsdp1.train_with_fsdp1, from_fsdp1.train_with_fsdp2)
        for line in inspect.getsource(train).splitlines()
    ]
    assert max(map(len, lines)) <= 70
