"""CPU ranks beside a GPU leave it alone: every strategy and API, torchrun, checkpoints, and a rank that stops."""

import json
import sys

import pytest
from leftovers import PROJECT

from fsdp_helpers.checkpointing.folder import checkpoint_name, find_steps
from fsdp_helpers.checkpointing.shard_index import read_index
from fsdp_helpers.config import APIS

SMALL = "model='simple', global_batch_size=24, max_steps=3, train_images=240, test_images=24, dropout=False"
GRID = f"""
import json
import torch
from workers_for_tests import train_all
from fsdp_helpers.config import APIS, TrainConfig
from fsdp_helpers.data.source import prepare_data
from fsdp_helpers.ranks.launch import launch

if __name__ == "__main__":
    prepare_data()
    runs = [("ddp", "fsdp2")] + [(name, api) for name in ("fsdp", "fsdp-auto-wrap") for api in APIS]
    runs.append(("fsdp-offload", "fsdp2"))  # FSDP1's pins host memory, which needs an accelerator
    configs = [TrainConfig(strategy=name, api=api, {SMALL}, checkpoint_dir="saved/" + name + api) for name, api in runs]
    found = launch(train_all, configs, world_size=NUM_RANKS, device="DEVICE", progress=False)
    print(json.dumps([[record.device, record.step_losses] for record in found[0]]))
    assert not torch.cuda.is_initialized()
"""
FIND = """
import os
import torch
from fsdp_helpers.gpus import find_gpus, hide_gpus

print(os.getpid(), find_gpus(WANTED), sep="\\n")
hide_gpus()  # torch has not looked in this process, or it would still see one
layer = torch.nn.Linear(3, 3)
layer(torch.zeros(2, 3)).sum().backward()
torch.optim.Adam(layer.parameters()).step()
assert not torch.cuda.is_initialized()
"""
STOPPED = """
from launch_workers import stop_rank_1
from fsdp_helpers.ranks.launch import launch

if __name__ == "__main__":
    try:
        launch(stop_rank_1, "full", world_size=2, device="cpu", group_timeout_s=6.0, timeout_s=60, progress=False)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""
LESSONS = """
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.teaching.lessons.traced_step import trace_step

if __name__ == "__main__":
    config = TrainConfig(max_steps=2, global_batch_size=8, train_images=16, test_images=8)
    trace_step(config, world_size=4, device="cpu")
"""


def run_grid(run_python, variables, *, num_ranks=2, device="cpu") -> list:
    """Each run's device and losses."""
    return json.loads(run_python(GRID.replace("NUM_RANKS", str(num_ranks)).replace("DEVICE", device), variables))


def test_every_strategy_and_api_and_no_rank_looks(gpus, run_python, tmp_path):
    found = run_grid(run_python, gpus.environment())
    assert len(found) == 6 and {device for device, _ in found} == {"cpu"}
    assert all(losses == pytest.approx(found[0][1], abs=1e-5) for _, losses in found)
    assert gpus.touched() == []
    saved = sorted((tmp_path / "saved").iterdir())
    assert len(saved) == 6
    for run in saved:
        names = [entry.name for entry in read_index(run / checkpoint_name(max(find_steps(run))))]
        assert not [name for name in names if "cuda" in name]


def test_auto_with_more_ranks_than_gpus_is_the_cpu(gpus, run_python):
    assert {device for device, _ in run_grid(run_python, gpus.environment(2), num_ranks=3, device="auto")} == {"cpu"}
    assert gpus.touched() == []


def test_a_driver_that_torch_cannot_use_is_no_gpu(gpus, run_python):
    """One device is counted and one rank is wanted: `auto` would take it."""
    found = run_grid(run_python, gpus.environment(too_old=True), num_ranks=1, device="auto")
    assert {device for device, _ in found} == {"cpu"}
    assert gpus.touched() == []


def test_lessons_on_more_ranks_than_gpus(gpus, run_python):
    """Beside two GPUs a third rank that took "its own" would ask for one that is not there."""
    run_python(LESSONS, gpus.environment(2))
    assert gpus.touched() == []


@pytest.mark.parametrize("api", APIS)
def test_under_torchrun(gpus, run_beside, api, tmp_path):
    train = ["-m", "fsdp_helpers", "train", "--strategy", "fsdp-auto-wrap", "--api", api, "--device", "cpu"]
    train += ["--model", "simple", "--train-images", 240, "--test-images", 24, "--global-batch-size", 24]
    train += ["--max-steps", 3, "--json", tmp_path / "run.json"]
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run_beside([*starter, *train], gpus.environment() | {"PET_LOG_DIR": "/dev/null"})
    assert json.loads((tmp_path / "run.json").read_text())["device"] == "cpu"
    assert gpus.touched() == []


def test_a_stopped_rank_is_named_within_the_time_out(gpus, run_python):
    """In the group of a mesh: beside a visible GPU that would be a new one, with a time-out of half an hour."""
    line = run_python(STOPPED, gpus.environment()).strip()
    assert line.startswith("RankError") and "rank 1 didn't answer within 6 s" in line
    assert gpus.touched() == []


def test_counting_leaves_the_gpu_alone(gpus, run_python):
    assert "Gpus(count=2, problem='')" in run_python(FIND.replace("WANTED", "0"), gpus.environment(2))
    assert gpus.uses() == []


def test_a_gpu_is_tried_by_a_child(gpus, run_python):
    """Nothing can be allocated on it; the process that asks, and then trains on the CPU, does not touch it."""
    pid, found = run_python(FIND.replace("WANTED", "1"), gpus.environment()).splitlines()
    assert found == "Gpus(count=1, problem='CUDA out of memory')"
    assert gpus.uses() and int(pid) not in {use.pid for use in gpus.uses()}


def test_a_driver_that_is_too_old_says_so(gpus, run_python):
    found = run_python(FIND.replace("WANTED", "0"), gpus.environment(too_old=True))
    assert "Gpus(count=1, problem='The NVIDIA driver on your system is too old (found version " in found


def test_tests_use_a_gpu_only_if_asked(gpus, run_beside):
    """Without `-m gpu` its tests are skipped, and all others run CPU ranks."""
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", PROJECT / "tests" / "test_gpu.py"]
    done = run_beside(program, gpus.environment())
    assert "not asked for: pytest -m gpu" in done.stdout and "passed" not in done.stdout
    assert gpus.uses() == []
