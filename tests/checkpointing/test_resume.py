"""A run that was stopped, in any way and at any moment, goes on as if it had not been."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import checkpoint_workers as workers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from leftovers import END_S
from programs import running, wait_until
from runs import FIXTURES, OFFLINE, main_in_process, mostly_long, train

from fsdp_helpers.checkpointing.folder import CheckpointError, checkpoint_name, find_steps, locked
from fsdp_helpers.checkpointing.resume import RunCheckpoints, find_start
from fsdp_helpers.checkpointing.shard_index import read_index
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import RankError, launch
from fsdp_helpers.records import RunRecord
from fsdp_helpers.training.run import train as train_run
from fsdp_helpers.training.worker import train_worker

RUNS = [
    ("local", "fsdp2", 1),
    ("ddp", "fsdp2", 2),
    ("ddp", "fsdp2", 3),
    ("fsdp", "fsdp1", 2),
    ("fsdp-auto-wrap", "fsdp1", 3),
    ("fsdp", "fsdp2", 2),
    ("fsdp-auto-wrap", "fsdp2", 3),
    ("fsdp-offload", "fsdp2", 2),
]
# 101 images in batches of 24: 4 steps an epoch, 5 images left out. Epochs end after steps 4 and 8.
SETTINGS = {"global_batch_size": 24, "train_images": 101, "test_images": 12, "epochs": 3}
# 4 checkpoints in 8 steps, across the end of an epoch of 5
SHORT = {
    "model": "simple",
    "strategy": "fsdp",
    "global_batch_size": 8,
    "train_images": 43,
    "test_images": 12,
    "epochs": 2,
    "max_steps": 8,
}


@pytest.fixture(scope="module")
def no_mnist(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("no-mnist"))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, random state included."""
    tensors = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in read_index(path)}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """All in a folder: name -> size and time of its last change, but for the lock, which filelock 3.13 touches."""
    changed_ns = {path: 0 if path.name == ".lock" else path.stat().st_mtime_ns for path in folder.rglob("*")}
    return {str(path.relative_to(folder)): (path.stat().st_size, time_ns) for path, time_ns in changed_ns.items()}


def unfinished(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith((".writing-", ".removing-")))


# ---------------------------------------------------------------- a resumed run is the same run


def train_in_turn(world_size: int, *settings: dict) -> list[RunRecord]:
    """Rank 0's records of runs, one after the other."""
    configs = [TrainConfig(**each) for each in settings]
    return [launch(train_worker, config, world_size=world_size, device="cpu")[0] for config in configs]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("strategy, api, world_size", mostly_long(RUNS, telling=(3, 6)))
def test_five_steps_and_five_more_are_ten(strategy, api, world_size, no_mnist, tmp_path):
    """With dropout on, to the last bit: the losses, the evaluations and the state in the end."""
    settings = {"strategy": strategy, "api": api, "data_dir": no_mnist} | SETTINGS
    halves = settings | {"checkpoint_dir": str(tmp_path / "two")}
    first, undisturbed, second = train_in_turn(
        world_size,
        halves | {"max_steps": 5, "checkpoint_every": 2},
        settings | {"max_steps": 10, "checkpoint_dir": str(tmp_path / "one")},
        halves | {"max_steps": 10, "resume": True},
    )
    assert (find_steps(tmp_path / "one"), find_steps(tmp_path / "two")) == ([10], [2, 4, 5, 10])
    assert (first.first_step, second.first_step) == (0, 5)
    assert first.step_losses + second.step_losses == undisturbed.step_losses
    assert len(undisturbed.step_losses) == 10
    assert first.ranks == undisturbed.ranks  # saving adds to no bytes held, no peak and no collectives of a step

    # Epoch 1 ended in the first run, epoch 2 was cut in two after 1 of its steps, epoch 3 has the last 2 steps.
    assert [epoch.epoch for epoch in first.epochs] == [1, 2]
    assert [(epoch.epoch, epoch.train_images) for epoch in second.epochs] == [(2, 3 * 24), (3, 2 * 24)]
    assert evaluation(first.epochs[0]) == evaluation(undisturbed.epochs[0])
    assert [*map(evaluation, second.epochs)] == [*map(evaluation, undisturbed.epochs[1:])]

    states = [read_state(tmp_path / run / checkpoint_name(10)) for run in ("one", "two")]
    assert workers.differences(*states) == []
    assert [f"extra.random-state-{rank}" in states[0] for rank in range(world_size + 1)] == [True] * world_size + [
        False
    ]


def evaluation(epoch):
    return epoch.epoch, epoch.test_loss, epoch.test_correct


def test_a_run_goes_on_on_other_ranks_and_under_another_strategy(no_mnist, tmp_path):
    """To one process and to the other API; test_checkpoint.py has all others."""
    settings = {"data_dir": no_mnist, "dropout": False, "max_steps": 10} | SETTINGS
    strategy, api, world_size = RUNS[4]
    whole = settings | {"strategy": strategy, "api": api}
    saved = tmp_path / "saved"
    _, undisturbed = train_in_turn(world_size, whole | {"checkpoint_dir": str(saved), "max_steps": 5}, whole)
    for strategy, api, world_size in [("local", "fsdp2", 1), ("fsdp", "fsdp2", 2)]:
        folder = shutil.copytree(saved, tmp_path / f"{strategy}-{world_size}")
        resumed = train(strategy, world_size, api=api, checkpoint_dir=str(folder), resume=True, **settings)[0]
        assert resumed.first_step == 5
        assert resumed.step_losses == pytest.approx(undisturbed.step_losses[5:], abs=1e-5)
        assert resumed.epochs[-1].test_loss == pytest.approx(undisturbed.epochs[-1].test_loss, abs=1e-5)


@pytest.mark.gpu
def test_a_run_of_the_cpu_goes_on_on_a_gpu_and_back(no_mnist, tmp_path):
    """Losses are close, not equal: another device draws other masks, so dropout is off."""
    settings = SHORT | {"strategy": "local", "data_dir": no_mnist, "dropout": False}
    undisturbed = launch(train_worker, TrainConfig(**settings), world_size=1, device="cpu")[0]
    settings |= {"checkpoint_dir": str(tmp_path), "resume": True}
    for max_steps, device in [(3, "cpu"), (6, "cuda"), (8, "cpu")]:
        config = TrainConfig(**settings | {"max_steps": max_steps})
        resumed = launch(train_worker, config, world_size=1, device=device)[0]
        expected = undisturbed.step_losses[resumed.first_step : max_steps]
        assert resumed.step_losses == pytest.approx(expected, abs=1e-3)


def test_other_ranks_draw_new_dropout_masks(no_mnist, tmp_path):
    """Without its random state a rank must not begin again with the masks that it began with."""
    settings = {"data_dir": no_mnist, "checkpoint_dir": str(tmp_path)} | SETTINGS
    train("ddp", 2, max_steps=1, **settings)
    seeds = launch(
        workers.random_state_after_resuming,
        TrainConfig(strategy="ddp", resume=True, **settings),
        world_size=3,
        device="cpu",
    )
    assert len(set(seeds)) == 3
    first_seeds = {torch.Generator().manual_seed(1 + rank).get_state().numpy().tobytes() for rank in range(3)}
    assert not first_seeds & set(seeds)


# ---------------------------------------------------------------- where it begins, and where it ends


def test_resuming_from_nothing_is_starting(no_mnist, tmp_path):
    settings = SHORT | {"data_dir": no_mnist, "max_steps": 3}
    (tmp_path / "empty").mkdir()
    folders = [tmp_path / name for name in ("empty", "new", "new/in-new")]
    expected, *resumed = train_in_turn(
        2, settings, *(settings | {"checkpoint_dir": str(folder), "resume": True} for folder in folders)
    )
    for folder, record in zip(folders, resumed, strict=True):
        assert (record.first_step, record.step_losses) == (0, expected.step_losses)
        assert find_steps(folder) == [3]


def test_as_many_checkpoints_are_kept_as_asked_for_now_or_when_the_run_began(no_mnist, tmp_path):
    settings = SHORT | {"data_dir": no_mnist, "checkpoint_dir": str(tmp_path / "resumed"), "checkpoint_every": 2}
    # Of steps 3, 6 and, being the last, 8
    at_once = settings | {"checkpoint_dir": str(tmp_path / "at-once"), "checkpoint_every": 3, "keep_last": 2}
    train_in_turn(2, at_once, settings | {"keep_last": 1, "max_steps": 2}, settings | {"resume": True, "max_steps": 4})
    assert find_steps(tmp_path / "at-once") == [6, 8] and unfinished(tmp_path / "at-once") == []
    assert find_steps(tmp_path / "resumed") == [4]
    train(world_size=2, resume=True, **settings | {"keep_last": 2})  # a different number may be given
    assert find_steps(tmp_path / "resumed") == [6, 8]


def arguments(settings: dict, *more) -> list:
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["train", "--device", "cpu", *flags, *more]


def test_a_finished_run_trains_nothing_and_evaluates(no_mnist, tmp_path, capfd):
    folder = tmp_path / "run"
    settings = SHORT | {"data_dir": no_mnist, "checkpoint_dir": str(folder)}
    finished = train(world_size=2, **settings)[0]
    before = listing(folder)
    assert main_in_process(*arguments(settings, "--resume", "--json", tmp_path / "again.json")) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert (again["first_step"], again["step_losses"]) == (8, [])
    (epoch,) = again["epochs"]
    # Step 8 is in the second epoch of 5 steps; evaluated again, nothing trained.
    assert (epoch["epoch"], epoch["train_images"], epoch["train_loss"]) == (2, 0, None)
    assert epoch["test_loss"] == finished.epochs[-1].test_loss
    assert listing(folder) == before
    output = capfd.readouterr().out
    assert "after the first 8 of an earlier run" in output and "train loss" not in output


# ---------------------------------------------------------------- killed at any moment, nothing is lost


@pytest.fixture(scope="module")
def undisturbed(no_mnist) -> tuple[float, ...]:
    return train(world_size=2, **SHORT | {"data_dir": no_mnist})[0].step_losses


@pytest.fixture(scope="module")
def saving_config(no_mnist):
    def config(folder: Path, **settings) -> TrainConfig:
        always = {"data_dir": no_mnist, "checkpoint_dir": str(folder), "checkpoint_every": 2, "keep_last": 2}
        return TrainConfig(**SHORT | always | settings)

    return config


@pytest.fixture(scope="module")
def moments(saving_config, tmp_path_factory) -> list[int]:
    """How many moments each rank has in a run that nobody kills."""
    folder = tmp_path_factory.mktemp("counted")
    return launch(
        workers.train_and_die,
        saving_config(folder / "run"),
        None,
        None,
        False,
        folder / "diary",
        world_size=2,
        device="cpu",
    )


def check_that_nothing_is_lost(folder: Path, steps_done: int, saving_config, undisturbed) -> None:
    """After a kill: a checkpoint not older than it has to be, from which the run goes on exactly, in a clean folder."""
    newest = ([0] + find_steps(folder))[-1]
    # A checkpoint is due at every second step, and the one of the last step done may have been under way.
    assert newest >= (steps_done - 1) // 2 * 2
    resumed = launch(train_worker, saving_config(folder, resume=True), world_size=2, device="cpu", timeout_s=240)[0]
    assert resumed.first_step == newest
    assert resumed.step_losses == undisturbed[newest:]
    assert unfinished(folder) == []
    # All but two are removed at the next saving, if there is one.
    assert find_steps(folder) == [6, 8] if newest < 8 else find_steps(folder)[-2:] == [6, 8]


def test_there_are_many_moments_to_be_killed_at(moments):
    # On each rank, 8 steps with a moment before and one after; 4 savings of many moments each.
    assert moments[0] > 60 and moments[1] > 24


@pytest.mark.parametrize(
    "everyone, part", mostly_long([(part % 2 == 1, part // 2) for part in range(26)], telling=(19,))
)
def test_killed_on_rank_0(everyone, part, moments, saving_config, undisturbed, tmp_path):
    """At 26 moments from the first to the last: rank 0 alone at every other one, all ranks at those in between."""
    moment = 1 + round((2 * part + everyone) / 25 * (moments[0] - 1))
    kill_and_check(0, moment, everyone, saving_config, undisturbed, tmp_path)


@pytest.mark.parametrize("part", mostly_long(range(6), telling=(3,)))
def test_killed_on_rank_1(part, moments, saving_config, undisturbed, tmp_path):
    moment = 1 + round(part / 5 * (moments[1] - 1))
    kill_and_check(1, moment, False, saving_config, undisturbed, tmp_path)


def kill_and_check(victim, moment, everyone, saving_config, undisturbed, tmp_path):
    folder, diary = tmp_path / "run", tmp_path / "diary"
    diary.touch()
    with pytest.raises(RankError, match="ended by SIGKILL"):
        launch(
            workers.train_and_die,
            saving_config(folder),
            victim,
            moment,
            everyone,
            diary,
            world_size=2,
            device="cpu",
            timeout_s=240,
        )
    check_that_nothing_is_lost(folder, len(diary.read_bytes()), saving_config, undisturbed)


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen) -> None:
    assert wait_until(lambda: len(find_steps(folder)) >= count or process.poll() is not None)
    assert process.poll() is None, "the run ended by itself"


def wait_for_lock(folder: Path) -> None:
    """A killed process is off the list of processes a moment before the system takes back its locks."""

    def is_free() -> bool:
        with suppress(CheckpointError), locked(folder):
            return True
        return False

    assert wait_until(is_free, END_S)


@pytest.mark.long
@pytest.mark.parametrize("whole_group", [True, False])
def test_the_command_line_killed_from_outside(whole_group, no_mnist, tmp_path, capfd):
    """Killed with its ranks, or alone: then the ranks end by themselves. A second run keeps off until then."""
    folder = tmp_path / "run"
    settings = SHORT | {"data_dir": no_mnist, "checkpoint_dir": str(folder), "epochs": 100_000, "max_steps": 100_000}
    settings["checkpoint_every"] = 1
    command = [sys.executable, OFFLINE, *map(str, arguments(settings))]
    temporary = tempfile.mkdtemp()  # of the process that is killed
    with running([str(part) for part in command], variables={"TMPDIR": temporary}) as process:
        wait_for_steps(folder, 3, process)
        # One step: should it be let in, it ends at once.
        assert main_in_process(*arguments(settings | {"max_steps": 1}, "--resume")) == 2
        (line,) = complaints(capfd)
        assert f"another run is writing its checkpoints to {folder}" in line
        wait_for_steps(folder, len(find_steps(folder)) + 1, process)  # the first has not noticed
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    wait_for_lock(folder)
    shutil.rmtree(temporary)
    newest = find_steps(folder)[-1]
    settings["max_steps"] = newest + 2
    assert main_in_process(*arguments(settings, "--resume", "--json", tmp_path / "run.json")) == 0
    resumed = json.loads((tmp_path / "run.json").read_text())
    expected = train(world_size=2, **SHORT | {"data_dir": no_mnist, "epochs": 100_000, "max_steps": newest + 2})[0]
    assert resumed["first_step"] == newest
    assert resumed["step_losses"] == list(expected.step_losses[newest:])
    assert unfinished(folder) == []


# ---------------------------------------------------------------- asked to end


@pytest.mark.parametrize("asked", mostly_long([0, 1], telling=(1,)))  # rank 0 saves, and has to hear of the other
def test_all_ranks_stop_after_the_same_step_when_one_is_asked(asked, saving_config, undisturbed, tmp_path):
    """SIGTERM may reach one machine alone, or sooner than the other; step 5 is no step to save after by itself."""
    folder = tmp_path / "run"
    ends = launch(
        workers.train_and_be_asked, saving_config(folder), asked, 5, world_size=2, device="cpu", timeout_s=240
    )
    assert (
        ends == [f"ended early by SIGTERM: saved after step 5 of 8 in {folder}; continue from there with --resume"] * 2
    )
    assert find_steps(folder)[-1] == 5
    check_that_nothing_is_lost(folder, 5, saving_config, undisturbed)


# ---------------------------------------------------------------- a full disk


# Rank 0 alone writes the description, and has to hear that the other could not write its shards.
@pytest.mark.parametrize("full_on, part", mostly_long([(0, "shards"), (1, "shards"), (0, "description")], telling=(2,)))
def test_a_disk_that_fills_up(full_on, part, saving_config, undisturbed, tmp_path):
    """The third checkpoint, of step 6, does not fit: on one rank a file cannot grow any more."""
    folder = tmp_path / "run"
    with pytest.raises(RankError) as caught:
        launch(
            workers.train_on_a_full_disk,
            saving_config(folder),
            full_on,
            3,
            part,
            world_size=2,
            device="cpu",
            timeout_s=240,
        )
    assert f"CheckpointError: {folder}" in caught.value.summary.replace("fsdp_helpers.checkpointing.folder.", "")
    assert find_steps(folder) == [2, 4]
    assert unfinished(folder) == []
    check_that_nothing_is_lost(folder, 6, saving_config, undisturbed)


@pytest.mark.parametrize(
    "reason", [PermissionError(13, "Permission denied"), CheckpointError("step-00000001 is stuck")]
)
def test_an_old_checkpoint_that_stays_is_no_failed_save(reason, tmp_path, monkeypatch):
    def refuse(*args) -> None:
        raise reason

    monkeypatch.setattr("fsdp_helpers.checkpointing.folder.keep_newest", refuse)
    config = TrainConfig(model="simple", strategy="local", checkpoint_dir=str(tmp_path), keep_last=1)
    checkpoints = RunCheckpoints(config, 0, "digits")
    with pytest.raises(CheckpointError) as caught:
        checkpoints.after_step(*workers.build(config, seed=1), last_step=1)
    expected = f"{tmp_path}: the checkpoint of step 1 was saved, but an older one wasn't removed ({reason})"
    assert str(caught.value) == expected
    assert find_steps(tmp_path) == [1]


# ---------------------------------------------------------------- refused before any rank starts


@pytest.fixture(scope="module")
def saved_run(no_mnist, tmp_path_factory) -> Path:
    """A run's folder with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    settings = SHORT | {"data_dir": no_mnist, "max_steps": 4, "checkpoint_every": 2}
    train(world_size=2, checkpoint_dir=str(folder), **settings)
    return folder


@pytest.fixture
def run_folder(saved_run, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(saved_run, tmp_path / "run")


@pytest.fixture
def no_rank(monkeypatch):
    monkeypatch.setattr(
        "fsdp_helpers.ranks.launch.Processes", lambda *args, **settings: pytest.fail("a rank was started")
    )


def complaints(capfd) -> list[str]:
    """What was said on standard error, but for the line that says which data are in use."""
    return [line for line in capfd.readouterr().err.splitlines() if not line.startswith("Data: ")]


def resume(folder: Path, no_mnist: str, *more, **settings) -> int:
    return main_in_process(*arguments(SHORT | {"data_dir": no_mnist, "checkpoint_dir": folder} | settings, *more))


def garble(path: Path) -> None:
    """Other bytes, as many."""
    path.write_bytes(b"garbage " * (path.stat().st_size // 8) + b"!" * (path.stat().st_size % 8))


def test_a_damaged_checkpoint_is_refused_in_one_line(run_folder, no_mnist, no_rank, capfd):
    """test_folder.py and test_consolidate.py have other damages."""
    (run_folder / checkpoint_name(4) / "__1_0.distcp").unlink()
    before = listing(run_folder)
    assert resume(run_folder, no_mnist, "--resume") == 2
    (line,) = complaints(capfd)
    assert "__1_0.distcp is missing. Put it back, or delete step-00000004 to continue from step-00000002" in line
    assert listing(run_folder) == before


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model": "vit"}, "was saved with model 'simple', but this run has 'vit'"),
        ({"train_images": 42}, "was saved with train_images 43, but this run has 42"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(settings, message, saved_run, no_mnist, no_rank, capfd):
    before = listing(saved_run)
    assert resume(saved_run, no_mnist, "--resume", **settings) == 2
    (line,) = complaints(capfd)
    assert message in line and "another --checkpoint-dir" in line
    assert listing(saved_run) == before


def test_other_data_are_refused(saved_run, no_mnist, no_rank, monkeypatch, capfd):
    """A machine with MNIST resumes what one without it has saved: the losses would go on with other images."""
    before = listing(saved_run)
    monkeypatch.setattr("fsdp_helpers.training.run.prepare_run_data", lambda config: "mnist")
    assert resume(saved_run, no_mnist, "--resume") == 2
    (line,) = complaints(capfd)
    assert (
        "was saved with data_source 'digits', but this run has 'mnist'" in line and "another --checkpoint-dir" in line
    )
    assert listing(saved_run) == before


def test_checkpoints_are_not_mixed_with_those_of_a_run_from_the_start(saved_run, no_mnist, no_rank, capfd):
    before = listing(saved_run)
    assert resume(saved_run, no_mnist) == 2
    (line,) = complaints(capfd)
    assert "has checkpoints up to step-00000004; continue from there with --resume" in line
    assert listing(saved_run) == before


def test_damaged_shards_of_the_right_size_fail_by_name(run_folder, no_mnist, capfd):
    """Only a rank reads them, so this is a failed run, but it names the checkpoint."""
    garble(run_folder / checkpoint_name(4) / "__1_0.distcp")
    assert resume(run_folder, no_mnist, "--resume") == 1
    first = complaints(capfd)[0]
    assert str(run_folder / checkpoint_name(4)) in first
    assert "CheckpointError" in first


# ---------------------------------------------------------------- checkpoints of earlier versions


def skip_if_this_torch_is_older(saved: Path) -> None:
    """Torch itself refuses what a newer one wrote, where a record has a field more since."""
    try:
        read_index(saved / checkpoint_name(4))
    except CheckpointError as error:
        if "a newer version wrote it" not in str(error):
            raise
        pytest.skip(str(error).rpartition(": ")[2])


@pytest.mark.parametrize("saved", sorted(FIXTURES.glob("saved-by-*")), ids=lambda path: path.name)
def test_a_checkpoint_of_an_earlier_version_goes_on(saved, digits_dir, tmp_path):
    """Losses of the whole run are kept beside it; another processor may round the last digits differently."""
    skip_if_this_torch_is_older(saved)
    run = json.loads((saved / "run.json").read_text())
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "run.json").unlink()
    config = TrainConfig(**run["settings"], data_dir=str(digits_dir), checkpoint_dir=str(folder), resume=True)
    resumed = train_run(config, world_size=run["world_size"], device="cpu")
    assert resumed.first_step == 4
    assert resumed.step_losses == pytest.approx(run["losses_of_the_undisturbed_run"][4:], abs=1e-5)


def test_a_setting_that_is_newer_than_a_checkpoint_counts_as_its_default(tmp_path):
    saved = FIXTURES / "saved-by-1.0.0"
    skip_if_this_torch_is_older(saved)
    settings = json.loads((saved / "run.json").read_text())["settings"]
    shutil.copytree(saved / checkpoint_name(4), tmp_path / checkpoint_name(4))
    description = tmp_path / checkpoint_name(4) / "checkpoint.json"
    content = json.loads(description.read_text())
    del content["settings"]["micro_batches"]
    description.write_text(json.dumps(content))
    config = TrainConfig(**settings, checkpoint_dir=str(tmp_path), resume=True)
    _, checkpoint = find_start(config, "digits")
    assert checkpoint.step == 4
    with pytest.raises(CheckpointError, match="was saved with micro_batches 1, but this run has 2"):
        find_start(replace(config, micro_batches=2), "digits")
    content["settings"]["clip_norm"] = 0.5  # as a run may have set it that this version can't go on with
    description.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="was saved with clip_norm 0.5, and `train` no longer clips gradients"):
        find_start(config, "digits")
