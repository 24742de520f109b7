"""Each verdict of `make test-gpu` on numbers where all is well, and on numbers that turn it red. No GPU is needed."""

import copy
import os
import subprocess
import sys

import pytest
from leftovers import PROJECT
from on_gpu import claims, live, plans, scripts

from fsdp_helpers.cli.doctor.rows import FAIL, NOTE, PASS

STATE = 16 * claims.NUM_PARAMS
MB = 10**6


def run(**changes) -> dict:
    """A run's numbers, such as `numbers_of` returns."""
    values = {
        "parameter_bytes": STATE // 4,
        "gradient_bytes": STATE // 4,
        "optimizer_bytes": STATE // 2,
        "held_bytes": STATE + 44,
        "peak_bytes": 37 * MB,
        "predicted_peak_bytes": 37 * MB,
        "losses": [2.3, 2.2],
    }
    return values | changes


def stream(**changes) -> dict:
    block_bytes = claims.NUM_BLOCKS * claims.BLOCK_BYTES
    copied = {"to_device_bytes": 2 * block_bytes, "to_host_bytes": block_bytes, "pinned": 16, "shards": 16}
    times = {"overlap_us": 50.0, "beside_us": 90.0, "to_device_us": 80.0, "to_device_overlap_us": 0.0}
    return {"streams": [7, 8]} | copied | times | changes


def script_run(steps, status: int = 0, shift: float = 0.0) -> dict:
    return {"status": status, "losses": {str(step + 1): 2.5 - 0.1 * step + shift for step in steps}, "output": ""}


def plan(**changes) -> dict:
    measured = {"requested_bytes": 2000 * MB, "allocated_bytes": 2100 * MB, "reserved_bytes": 2200 * MB}
    measured |= {"seconds": [0.1, 0.2, 0.3], "host_update_bytes_per_s": 1e11} | changes
    planned = {"peak_bytes": 2000 * MB, "step_s": [0.15, 0.25]}
    return {"num_params": 8 * 10**8, "plan_by_shape": planned, "plan_by_factory": planned, "measured": measured}


KILLED = {"killed": script_run(range(8)), "saved": 4, "steps": 10, "continued": script_run(range(4, 10))}
GOOD = {
    "local": {"local": run()},
    "ddp": {"local": run(), "ddp": run(held_bytes=20 * claims.NUM_PARAMS + 44)},
    "fsdp2": {"local": run(), "fsdp2": run()},
    "fsdp1": {"local": run(), "fsdp1": run(predicted_peak_bytes=None)},
    "offload, fsdp2": {"local": run(), "offload, fsdp2": run(held_bytes=1000)},
    "units": {"none": run(), "units": run(peak_bytes=20 * MB, predicted_peak_bytes=20 * MB)},
    "bf16": {"none": run(), "bf16": run(peak_bytes=20 * MB, predicted_peak_bytes=20 * MB, losses=[2.301, 2.2])},
    "all GPUs": {"num_gpus": 2, "runs": {"ddp": run(), "fsdp2": run(parameter_bytes=0, optimizer_bytes=0)}},
    "streams": {"fsdp2": stream(), "offload": stream()},
    "compile per block": {
        "num_graphs": 1,
        "eager": {"losses": [2.3, 2.2], "step_s": 0.01},
        "compiled": {"losses": [2.3, 2.2], "step_s": 0.005, "first_s": 9.0},
    },
    "plans": {"gpu": "NVIDIA H100 80GB HBM3", "bf16": plan(), "bf16, offload": plan(), "fp32": plan(seconds=[9.0])},
    "live ranks": {
        "message": "rank 0 of 1 failed: OutOfMemoryError: CUDA out of memory.",
        "total": [1.0],
        "device": ["cuda:0"],
        "is_the_same": True,
        "alive": [],
        "free_before": 80_000 * MB,
        "free_after": 80_000 * MB,
    },
    "checkpoint.py": KILLED,
    "fsdp2.py": {"expected": [2.5 - 0.1 * step for step in range(6)], "run": script_run(range(6))},
    "finetune_hf.py, adapters": {"run": script_run(range(10))},
    "pytest -m gpu": {"tests": {"passed": 40, "skipped": 0, "failed": {}}},
}
CHECKS = {check.title: check for module in (claims, plans, live, scripts) for check in module.CHECKS}


def change(*path_and_value):
    """Numbers with one value changed, which is found by following the path."""
    *path, name, value = path_and_value

    def apply(numbers: dict) -> None:
        for step in path:
            numbers = numbers[step]
        numbers[name] = value

    return apply


def drop(*path):
    def apply(numbers: dict) -> None:
        for step in path[:-1]:
            numbers = numbers[step]
        del numbers[path[-1]]

    return apply


BAD = [
    ("local", change("local", "gradient_bytes", 0), "local: parameters, gradients, moments"),
    ("local", change("local", "held_bytes", round(1.001 * STATE)), "local: bytes held on the GPU"),
    ("local", change("local", "held_bytes", STATE - 1), "local: bytes held on the GPU"),
    ("local", change("local", "peak_bytes", 40 * MB), "local: peak"),
    ("local", change("local", "peak_bytes", 34 * MB), "local: peak"),
    ("ddp", change("ddp", "held_bytes", STATE), "ddp: bytes held on the GPU"),
    ("fsdp2", change("fsdp2", "losses", [2.3, 2.2001]), "fsdp2: losses of one process"),
    ("offload, fsdp2", change("offload, fsdp2", "held_bytes", STATE), "offload, fsdp2: bytes held on the GPU"),
    ("units", change("none", "peak_bytes", 40 * MB), "transformer, before units: peak"),
    ("units", change("units", "peak_bytes", 37 * MB), "transformer, units: lower peak"),
    ("units", change("units", "losses", [2.3, 2.2001]), "transformer, units: losses"),
    ("bf16", change("bf16", "peak_bytes", 22 * MB), "transformer, bf16: peak"),
    ("bf16", change("bf16", "losses", [2.3, 2.2]), "transformer, bf16: losses"),
    ("bf16", change("bf16", "losses", [2.3, 2.5]), "transformer, bf16: losses"),
    ("all GPUs", change("runs", "fsdp2", "peak_bytes", 40 * MB), "fsdp2, 2 GPUs: peak"),
    ("all GPUs", change("runs", "fsdp2", "losses", [2.3, 2.3]), "fsdp2, 2 GPUs: losses of DDP"),
    ("all GPUs", change("runs", "fsdp2", "optimizer_bytes", STATE // 2), "fsdp2, 2 GPUs: state"),
    ("streams", change("offload", "pinned", 15), "offload: pinned shards"),
    ("streams", change("offload", "to_device_bytes", 1), "offload: bytes to the GPU in a step"),
    ("streams", change("offload", "to_host_bytes", 0), "offload: bytes to the host in a step"),
    ("streams", change("offload", "to_device_overlap_us", 40.0), "offload: copies to the GPU beside arithmetic"),
    ("streams", change("offload", "to_device_us", 0.0), "offload: copies to the GPU beside arithmetic"),
    ("compile per block", change("num_graphs", 4), "compiled blocks: graphs for all four"),
    ("compile per block", change("compiled", "losses", [2.3, 2.21]), "compiled blocks: losses"),
    ("plans", change("bf16", "measured", "requested_bytes", 2200 * MB), "0.8 B, bf16: peak, planned by shape"),
    ("plans", change("bf16", "measured", "requested_bytes", 1800 * MB), "0.8 B, bf16: peak, planned by factory"),
    ("plans", change("bf16", "measured", "seconds", [0.3]), "0.8 B, bf16: seconds per step"),
    ("plans", change("bf16", "measured", "seconds", [0.1]), "0.8 B, bf16: seconds per step"),
    ("live ranks", change("message", "rank 0 of 1 failed: KeyError"), "a cell that fills the GPU"),
    ("live ranks", drop("message"), "a cell that fills the GPU"),
    ("live ranks", change("total", [0.0]), "the next cell, in the same rank"),
    ("live ranks", change("device", ["cpu"]), "the next cell, in the same rank"),
    ("live ranks", change("is_the_same", False), "the next cell, in the same rank"),
    ("live ranks", change("alive", [17]), "closed: processes"),
    ("live ranks", change("free_after", 79_000 * MB), "closed: free memory"),
    ("checkpoint.py", change("saved", 0), "checkpoint.py: killed and continued"),
    ("checkpoint.py", change("continued", "status", 1), "checkpoint.py: killed and continued"),
    ("checkpoint.py", change("continued", script_run(range(10))), "checkpoint.py: killed and continued"),
    ("checkpoint.py", change("continued", script_run(range(4, 10), shift=0.1)), "checkpoint.py: steps taken again"),
    ("checkpoint.py", change("killed", script_run(range(3))), "checkpoint.py: steps taken again"),
    ("fsdp2.py", change("run", "status", 1), "fsdp2.py under torchrun"),
    ("fsdp2.py", change("run", script_run(range(5))), "fsdp2.py under torchrun"),
    ("fsdp2.py", change("run", script_run(range(6), shift=0.01)), "fsdp2.py: losses of one CPU process"),
    ("fsdp2.py", change("run", script_run([])), "fsdp2.py: losses of one CPU process"),
    ("finetune_hf.py, adapters", change("run", script_run(range(1, 9))), "finetune_hf.py, adapters"),
    ("finetune_hf.py, adapters", change("run", "losses", "10", 2.5), "finetune_hf.py, adapters: loss"),
    ("pytest -m gpu", change("tests", "failed", {"test_gpu::test_x": "no"}), "pytest -m gpu"),
    ("pytest -m gpu", change("tests", "passed", 0), "pytest -m gpu"),
]


@pytest.mark.parametrize("title", GOOD)
def test_where_all_is_well(title):
    assert {finding.result for finding in CHECKS[title].judge(GOOD[title])} <= {PASS, NOTE}


@pytest.mark.parametrize("title, break_it, what", BAD)
def test_each_verdict_can_fail(title, break_it, what):
    numbers = copy.deepcopy(GOOD[title])
    break_it(numbers)
    assert what in {finding.what for finding in CHECKS[title].judge(numbers) if finding.result == FAIL}


def test_these_are_all_verdicts():
    """Whatever passes on good numbers fails somewhere above; a strategy's or a plan's name makes no difference."""

    def kinds(names) -> set[str]:
        return {name.split(": ")[-1] for name in names}

    passed = {one.what for title in GOOD for one in CHECKS[title].judge(GOOD[title]) if one.result == PASS}
    assert kinds(passed) - kinds(what for _, _, what in BAD) == {"work beside the arithmetic"}  # a note at worst
    judges = {getattr(check.judge, "func", check.judge) for check in CHECKS.values()}
    assert judges == {getattr(CHECKS[title].judge, "func", CHECKS[title].judge) for title in GOOD}


def test_work_that_runs_beside_nothing_is_a_note():
    found = list(claims.judge_streams({"fsdp2": stream(overlap_us=0.0), "offload": stream()}))
    assert found[0].result == NOTE and found[1].result == PASS


def test_a_gpu_that_the_planner_does_not_know_has_no_range():
    found = [one.result for one in plans.judge_plans({"gpu": "NVIDIA A", "bf16": plan()})]
    assert found == [PASS, PASS, NOTE, NOTE]
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-40GB": "a100-40", "Tesla T4": "t4", "NVIDIA L4": "l4"}
    assert {name: plans.planned_device(name) for name in names} == names


def test_overlap_counts_each_moment_once():
    compute = [("gemm", 7, 0, 100), ("gemm", 7, 50, 200), ("gemm", 7, 300, 400)]
    copies = [("Memcpy HtoD (Pinned -> Device)", 8, 150, 350), ("Memcpy HtoD (Pinned -> Device)", 9, 190, 320)]
    assert claims.busy_ns(compute) == 300 and claims.busy_ns(copies) == 200
    assert claims.overlap_ns(copies, compute) == 50 + 50
    found = claims.summarize(compute + copies)
    assert (found["beside_us"], found["overlap_us"], found["to_device_overlap_us"]) == (0.2, 0.1, 0.1)
    assert found["copies_from"] == ["Memcpy HtoD (Pinned -> Device)"] and found["streams"] == [7, 8, 9]
    assert claims.summarize([])["beside_us"] == 0


# ---------------------------------------------------------------- measurements, as far as CPU ranks go


def test_a_strategy_on_a_cpu_rank(monkeypatch):
    monkeypatch.setattr(claims, "DEVICE", "cpu")
    found = dict(CHECKS["fsdp2"].measure())
    assert {finding.result for finding in CHECKS["fsdp2"].judge(found)} == {PASS}


def test_a_live_rank_on_the_cpu(monkeypatch):
    monkeypatch.setattr(live, "DEVICE", "cpu")
    monkeypatch.setattr(live, "free_bytes", lambda: 80_000 * MB)
    monkeypatch.setattr(live, "FILL", "import torch; blocks = [0]; raise torch.OutOfMemoryError('CUDA out of memory.')")
    found = dict(live.measure_live())
    wrong = [one for one in live.judge_live(found) if one.result != PASS]
    assert [one.what for one in wrong] == ["the next cell, in the same rank"] and "on ['cpu']" in wrong[0].measured


@pytest.mark.long
def test_a_script_that_is_killed_and_continued_on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = dict(scripts.measure_checkpoint())
    assert {finding.result for finding in scripts.judge_killed("checkpoint.py", found)} == {PASS}


def test_without_a_gpu_one_line_and_status_2(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "GPU_RECORD": str(tmp_path / "record")}
    command = ["make", "--silent", "test-gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout.startswith("psutil ") and done.stdout.count("\n") == 1
    assert done.stderr.splitlines()[0] == "fsdp_helpers: no GPU: CUDA_VISIBLE_DEVICES hides them"
    assert not (tmp_path / "record").exists()


def test_every_check_can_be_imported_where_the_target_starts_them():
    code = "from on_gpu import claims, live, plans, scripts"
    command = ["make", "--silent", "test-gpu", f'PYTHON={sys.executable} -c "{code}"']
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
