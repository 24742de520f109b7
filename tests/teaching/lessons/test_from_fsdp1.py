"""FSDP2 goes on from FSDP1's old checkpoints, Adam's moments included."""

import pytest
import torch

from workers_for_tests import with_constants

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
