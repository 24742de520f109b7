"""Next to GPUs that don't exist: the driver does what its sources say, and CPU ranks leave its GPUs alone.

The first part shows the driver at work; otherwise, the second would pass for want of a GPU.
"""

import json
import subprocess
import sys

import pytest
from leftovers import PROJECT

from fsdp_helpers.checkpointing.folder import checkpoint_name, find_steps
from fsdp_helpers.checkpointing.shard_index import read_index

ASK = """
import torch

def say(what, ask):
    try:
        print(what, ask())
    except Exception as error:
        print(what, type(error).__name__, str(error).splitlines()[0])

say("count", torch.cuda.device_count)
say("available", torch.cuda.is_available)
say("name", lambda: torch.cuda.get_device_name(torch.cuda.device_count() - 1))
say("choose", lambda: torch.cuda.set_device(torch.cuda.device_count()))
say("zeros", lambda: torch.zeros(1, device="cuda"))
"""
STEP = """
import torch

layer = torch.nn.Linear(3, 3)
layer(torch.zeros(2, 3)).sum().backward()
torch.optim.Adam(layer.parameters()).step()
print(torch.cuda.is_initialized())
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
SMALL = "model='simple', global_batch_size=24, max_steps=3, train_images=240, test_images=24, dropout=False"
GRID = f"""
import json
import torch
from fsdp_helpers import TrainConfig, train

if __name__ == "__main__":
    # FSDP1's offload pins host memory, which needs an accelerator
    found = []
    for name, api in [("ddp", "fsdp2"), ("fsdp", "fsdp1"), ("fsdp-auto-wrap", "fsdp2"), ("fsdp-offload", "fsdp2")]:
        config = TrainConfig(strategy=name, api=api, {SMALL}, checkpoint_dir="saved/" + name)
        record = train(config, world_size=NUM_RANKS, device="DEVICE", progress=False)
        found.append([record.device, record.step_losses])
    print(json.dumps(found))
    assert not torch.cuda.is_initialized()
"""

# ---------------------------------------------------------------- the driver


def test_devices_are_counted_described_and_chosen_but_hold_nothing(gpus, run_python):
    lines = run_python(ASK, gpus.environment(2)).splitlines()
    assert lines[:3] == ["count 2", "available True", "name Simulated T4"]
    assert lines[3].startswith("choose AcceleratorError CUDA error: invalid device ordinal")
    assert lines[4].startswith("zeros OutOfMemoryError CUDA out of memory.")
    assert {use.what for use in gpus.uses()} >= {"initialize", "set_device", "allocate"}
    assert {use.rank for use in gpus.uses()} == {"-"}


def test_a_step_on_the_cpu_initializes_cuda(gpus, run_python):
    """Why CPU ranks hide the GPUs: torch's optimizers ask whether a stream is being captured."""
    assert run_python(STEP, gpus.environment()).strip() == "True"
    assert "initialize" in {use.what for use in gpus.uses()}


# ---------------------------------------------------------------- finding GPUs


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


# ---------------------------------------------------------------- CPU ranks


def run_grid(run_python, variables, *, num_ranks: int, device: str) -> list:
    """Each run's device and losses."""
    return json.loads(run_python(GRID.replace("NUM_RANKS", str(num_ranks)).replace("DEVICE", device), variables))


@pytest.mark.parametrize("count, num_ranks, device", [(1, 2, "cpu"), (2, 3, "auto")])  # auto: more ranks than GPUs
def test_no_rank_looks_at_a_gpu(count, num_ranks, device, gpus, run_python, tmp_path):
    found = run_grid(run_python, gpus.environment(count), num_ranks=num_ranks, device=device)
    assert len(found) == 4 and {device for device, _ in found} == {"cpu"}
    assert all(losses == pytest.approx(found[0][1], abs=1e-5) for _, losses in found)
    assert gpus.touched() == []
    for run in (tmp_path / "saved").iterdir():
        names = [entry.name for entry in read_index(run / checkpoint_name(max(find_steps(run))))]
        assert names and not [name for name in names if "cuda" in name]


def test_no_rank_under_torchrun_looks_at_a_gpu(gpus, run_beside, tmp_path):
    train = ["-m", "fsdp_helpers", "train", "--strategy", "fsdp-auto-wrap", "--device", "cpu"]
    train += ["--model", "simple", "--train-images", 240, "--test-images", 24, "--global-batch-size", 24]
    train += ["--max-steps", 3, "--json", tmp_path / "run.json"]
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    run_beside([*starter, *train], gpus.environment() | {"PET_LOG_DIR": "/dev/null"})
    assert json.loads((tmp_path / "run.json").read_text())["device"] == "cpu"
    assert gpus.touched() == []


def test_no_cell_of_a_notebook_looks_at_a_gpu(gpus, run_beside, tmp_path):
    """Neither its kernel nor its ranks, from top to bottom."""
    work = tmp_path / "work"
    copy = [sys.executable, "-m", "fsdp_helpers.cli.lab.working_copies", work]
    subprocess.run(copy, cwd=PROJECT, check=True, stdout=subprocess.PIPE)
    execute = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
    settings = {"IPYTHONDIR": str(tmp_path / "ipython"), "PET_LOG_DIR": "/dev/null"}
    run_beside([*execute, "--ExecutePreprocessor.timeout=600", work / "03_fsdp.ipynb"], settings | gpus.environment())
    assert gpus.touched() == []


def test_doctors_checks_fail_where_nothing_can_be_computed_and_none_hangs(gpus, run_beside):
    done = run_beside([sys.executable, "-m", "fsdp_helpers", "doctor", "--gpu"], gpus.environment(), status=1)
    table = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    verdicts = {row[0]: row[-1] for row in table}
    assert verdicts["versions"] == "ok"
    assert {verdicts[check] for check in ("machine", "collectives", "losses")} == {"WRONG"}
    assert "Paste this table into an issue." in done.stdout
