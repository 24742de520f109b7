"""14's DDP job, as its cells have it, moves to FSDP2 as if it had stayed: losses, norms, rates, average, Adam; and back."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from chapters import body, defined, read_chapter, statements
from take_home_workers import FOLDER
from workers_for_tests import with_constants
from written_files import importable, written_files

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import moved_job
from fsdp_helpers.teaching.lessons.moved_job import Job, compare_checkpoints

MOVED_AT, LAST_STEP = 3, 5  # steps: the first is in the middle of the second epoch of two
SMALL = {"TRAIN_IMAGES": 96}


def run(worker, job: Job, world_size: int = 2) -> moved_job.Record:
    arguments = (moved_job.__name__, SMALL, worker, job)
    return launch(with_constants, *arguments, world_size=world_size, device="cpu", timeout_s=240, progress=False)[0]


@pytest.fixture
def jobs(tmp_path) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules that the notebook's cells write."""
    with importable(written_files("14"), tmp_path):
        yield importlib.import_module("ddp_job"), importlib.import_module("fsdp2_job")


@pytest.fixture
def stayed(digits_dir, monkeypatch, tmp_path, jobs) -> tuple[moved_job.Record, str, str]:
    """The record of a run that stays under DDP, its last file, and a file of step MOVED_AT."""
    monkeypatch.setenv("FSDP_DATA_DIR", str(digits_dir))
    files = [str(tmp_path / f"{step}.pt") for step in (LAST_STEP, MOVED_AT)]
    record = run(jobs[0].train_ddp, Job(last_step=LAST_STEP, save_to=files[0]))
    run(jobs[0].train_ddp, Job(last_step=MOVED_AT, save_to=files[1]))
    return record, *files


def test_it_moves_in_mid_training_and_back(stayed, jobs, tmp_path):
    record, last_file, moving_file = stayed
    at_once = str(tmp_path / "at_once.pt")
    run(jobs[1].train_fsdp2, Job(last_step=MOVED_AT, resume_from=moving_file, save_to=at_once, seed=1))
    compared = compare_checkpoints(moving_file, at_once)
    # 55 tensors: patches 2, positions 1, four blocks of 12, norm 2, head 2
    assert compared == {
        "model": (55, 204_938, 0.0),
        "average": (55, 204_938, 0.0),
        "exp_avg": (55, 204_938, 0.0),
        "exp_avg_sq": (55, 204_938, 0.0),
        "step": (55, 55, 0.0),
    }
    schedules = [torch.load(path, weights_only=True)["schedule"] for path in (moving_file, at_once)]
    assert schedules[0] == schedules[1]
    groups = [torch.load(path, weights_only=True)["optimizer"]["param_groups"] for path in (moving_file, at_once)]
    for mine, theirs in zip(*groups, strict=True):
        assert all(mine[key] == theirs[key] for key in ("params", "weight_decay", "lr"))

    moved_file = str(tmp_path / "moved.pt")
    job = Job(last_step=LAST_STEP, resume_from=moving_file, save_to=moved_file, seed=1)
    moved = run(jobs[1].train_fsdp2, job, world_size=3)
    assert moved.losses == pytest.approx(record.losses[MOVED_AT:], abs=1e-5)
    assert moved.rates == record.rates[MOVED_AT:]
    assert moved.norms == pytest.approx(record.norms[MOVED_AT:], abs=1e-5)
    assert moved.parameter_bytes < 0.36 * record.parameter_bytes  # a third, and padding
    at_the_end = compare_checkpoints(last_file, moved_file)
    assert max(at_the_end[moment][2] for moment in ("exp_avg", "exp_avg_sq")) < 1e-6
    assert at_the_end["average"][2] < 1e-4 and at_the_end["step"][2] == 0

    returned = run(jobs[0].train_ddp, Job(last_step=LAST_STEP, resume_from=at_once, seed=2))
    assert returned.losses == record.losses[MOVED_AT:]


def test_the_cell_shards_as_the_other_lessons_do():
    shown = defined(body(read_chapter("14")), "shard")
    (own,) = ast.parse(inspect.getsource(moved_job.shard)).body
    assert statements(shown.body) == statements(own.body)


def test_the_cells_move_what_the_take_home_script_moves():
    """The hard cases are tested with the script: names of torch.compile, and parameters without moments."""
    script, cells = (FOLDER / "from_ddp.py").read_text(), written_files("14")["fsdp2_job.py"]
    for line in ('.replace("_orig_mod.", "")', "options.strict = False", ".state.pop(parameters[name], None)"):
        assert script.count(line) == cells.count(line) == 1, line


@pytest.mark.parametrize("part", ["model", "average", "optimizer"])
def test_a_file_that_differs_in_one_tensor_is_found(part, tmp_path):
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        adam = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        adam.step()
        states.append({"model": model.state_dict(), "average": {"mean": torch.ones(3)}, "optimizer": adam.state_dict()})
    where = states[1][part]["state"][0]["exp_avg"] if part == "optimizer" else next(iter(states[1][part].values()))
    where.add_(0.5)
    paths = [str(tmp_path / name) for name in ("one.pt", "other.pt")]
    for state, path in zip(states, paths, strict=True):
        torch.save(state, path)
    differences = {name: apart for name, (*_, apart) in compare_checkpoints(*paths).items() if apart}
    assert differences == {"exp_avg" if part == "optimizer" else part: 0.5}


def test_each_epoch_has_an_order_of_its_own(digits_dir, monkeypatch):
    """Two steps an epoch; a job that begins in the middle of the second one goes on with that epoch's order."""
    monkeypatch.setenv("FSDP_DATA_DIR", str(digits_dir))
    monkeypatch.setattr(moved_job, "TRAIN_IMAGES", 2 * moved_job.GLOBAL_BATCH)
    steps = [[labels for _, labels in parts] for parts in moved_job.load_steps(0, 2, 0, 4)]
    first, second = (torch.cat([*steps[epoch], *steps[epoch + 1]]) for epoch in (0, 2))
    assert not torch.equal(first, second) and not torch.equal(first.sort().values, second.sort().values)
    (again,) = [[labels for _, labels in parts] for parts in moved_job.load_steps(0, 2, 3, 4)]
    assert all(map(torch.equal, again, steps[3]))


def test_the_average_keeps_nine_tenths():
    average, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for module, value in ((average, 1.0), (model, 2.0)):
        torch.nn.init.constant_(module.weight, value)
    moved_job.update_average(average, model)
    assert average.weight.item() == pytest.approx(0.9 * 1 + 0.1 * 2)
