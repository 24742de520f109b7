"""What 14's jobs share: their units, the order of their batches, the average; and the comparison of their files."""

import ast
import inspect

import pytest
import torch
from chapters import body, defined, read_chapter, statements
from take_home_workers import FOLDER
from written_files import written_files

from fsdp_helpers.teaching.lessons import moved_job
from fsdp_helpers.teaching.lessons.moved_job import compare_checkpoints


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
