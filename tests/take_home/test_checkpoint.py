"""take_home/checkpoint.py loses at most the steps since its last save, whatever is killed and whenever."""

import re
import shutil
import sys
from itertools import count, pairwise
from pathlib import Path

import killed_at
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from programs import Killed, has_ended, wait_until
from take_home_workers import (
    FOLDER,
    LEFT_BY_A_KILLED_RUN,
    ask_one_rank_to_end,
    load_beside_an_older_listing,
    load_script,
    run_main,
    save_beside_a_slow_removal,
    save_steps_of,
    train_alone,
)
from torch.distributed import HashStore, TCPStore
from torch.distributed.checkpoint import CheckpointException
from torchrun_jobs import one_agent, torchrun_job, wait_for_output

from fsdp_helpers.ranks.launch import launch

SCRIPT = load_script("checkpoint.py")
MANY = 1_000_000  # steps: a run that is ended


def checkpoint_job(folder: Path, last_step: int, **settings):
    """The script under torchrun, on two ranks."""
    program = [FOLDER / "checkpoint.py"]
    return torchrun_job(one_agent(2), [folder / "run", last_step], folder, program=program, **settings)


def launched(worker, *arguments, world_size: int = 2) -> str:
    """What rank 0 prints as `launch` runs the script's `main`, which takes less time than torchrun."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = ("checkpoint.py", store.port, *arguments) if worker is run_main else (store.port, *arguments)
    return launch(worker, *place, world_size=world_size, device="cpu", timeout_s=240)[0]


def steps_and_losses(output: str) -> list[tuple[int, str]]:
    """What rank 0 printed, in this order; a step that was taken again is there again."""
    return [(int(step) - 1, loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", output, re.MULTILINE)]


# ---------------------------------------------------------------- killed during a save


def newest(folder: Path) -> str | None:
    """The number of the newest checkpoint."""
    return max((path.name for path in folder.glob("[0-9]*")), default=None)


@pytest.mark.long
def test_kills_lose_only_the_steps_since_the_last_save(tmp_path):
    when = "in saves of checkpoint.py"
    killed_at.survive(lambda _, name, variables: checkpoint_job(tmp_path, 12, name=name, **variables), when, tmp_path)
    outputs = [(tmp_path / f"job-{number}.out").read_text() for number in range(len(killed_at.SAVES[when]) + 1)]
    starts = [steps for steps in map(steps_and_losses, outputs) if steps]
    for killed, next_start in pairwise(starts):
        assert killed[-1][0] + 1 - next_start[0][0] <= SCRIPT.SAVE_EVERY
    done = {taken for steps in starts for taken in steps}
    assert len(done) == len(dict(done)) == 12  # a step taken again has the same loss, to the last digit
    undisturbed = train_alone("checkpoint.py", 12)  # in one process, which adds up in another order
    assert [float(dict(done)[step]) for step in range(12)] == pytest.approx(undisturbed, abs=1e-3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "000012"]


def test_nobody_writes_before_what_a_killed_run_left_is_gone(tmp_path):
    """Files do not tell: rank 0 plans a save, and most often has removed the folder before rank 1 may write into it."""
    for name in LEFT_BY_A_KILLED_RUN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").touch()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    for found in launch(save_beside_a_slow_removal, tmp_path, world_size=2, device="cpu", timeout_s=240):
        assert found == [False, False, False]  # checkpoint.py's, finetune.py's, and its export


def test_what_cannot_be_removed_stops_the_save(tmp_path, monkeypatch):
    """It would become a part of the next checkpoint."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    (tmp_path / "unfinished-000001").mkdir()

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(f"{path} belongs to somebody else")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(PermissionError):
        SCRIPT.save_checkpoint(tmp_path, {"weights": torch.ones(2), "step": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unfinished-000001"]


def save_and_be_killed(folder: Path, step: int, at_change: int) -> bool:
    """Save on one rank, and end at this change of names or folders, a removal half way through; False: it had no more."""
    changes, rename, rmtree = count(), Path.rename, shutil.rmtree

    def rename_or_die(path: Path, name: Path) -> Path:
        if next(changes) == at_change:
            raise Killed
        return rename(path, name)

    def rmtree_or_die(path: Path, **settings) -> None:
        if next(changes) == at_change:
            (path / ".metadata").unlink(missing_ok=True)
            raise Killed
        rmtree(path, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        patch.setattr(shutil, "rmtree", rmtree_or_die)
        try:
            SCRIPT.save_checkpoint(folder, {"weights": torch.full((2,), float(step)), "step": step})
        except (Killed, CheckpointException):  # the second where torch was at work
            return True
    return False


def test_a_kill_at_any_change_of_the_folder_leaves_a_whole_checkpoint(tmp_path):
    """Each moment of a save in turn, until a save has no more of them."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    steps = []
    for moment in count():
        folder = tmp_path / str(moment)
        assert not save_and_be_killed(folder, 5, at_change=100)
        (folder / "unfinished-000010").mkdir()  # of a run that was killed
        was_killed = save_and_be_killed(folder, 10, at_change=moment)
        state = {"weights": torch.zeros(2), "step": 0}
        SCRIPT.load(state, checkpoint_id=folder / newest(folder))
        assert state["weights"].tolist() == [state["step"]] * 2
        steps.append(state["step"])
        if not was_killed:
            break
    # as what is unfinished goes, as torch names its index, as the folder gets its name; as the older one goes, and after
    assert steps == [5, 5, 5, 10, 10]


def test_all_ranks_load_the_newest_that_rank_0_sees(tmp_path):
    """By its number: as text, 999995 would come after 1000000."""
    steps = (999_995, 1_000_000)
    found = launch(load_beside_an_older_listing, tmp_path, steps, world_size=2, device="cpu", timeout_s=240)
    assert found == [(1_000_000, 1_000_000.0)] * 2


def test_saved_every_few_steps_and_after_the_last(tmp_path):
    assert launched(save_steps_of, (tmp_path, 12), world_size=1) == [5, 10, 12]


def test_each_save_has_a_temporary_name_of_its_own(tmp_path, monkeypatch):
    """A node that has cached the name of the last one, renamed since, would write into a checkpoint."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    names = []
    monkeypatch.setattr(
        SCRIPT, "save", lambda state, checkpoint_id: names.append(checkpoint_id) or checkpoint_id.mkdir()
    )
    for step in (5, 10):
        SCRIPT.save_checkpoint(tmp_path, {"step": step})
    assert [path.relative_to(tmp_path).as_posix() for path in names] == ["unfinished-000005", "unfinished-000010"]
    assert [path.name for path in tmp_path.iterdir()] == ["000010"]


# ---------------------------------------------------------------- asked to end, left alone, shut out


def test_all_ranks_end_after_the_same_step_when_one_is_asked(tmp_path):
    output = launched(ask_one_rank_to_end, (tmp_path, MANY), 1, 2)  # rank 1, in the third step
    assert [step for step, _ in steps_and_losses(output)] == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "000003"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can end a process with its parent")
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path):
    with checkpoint_job(tmp_path, MANY) as job:
        wait_for_output(r"(step 1) ", job)
        ranks = job.workers().values()
        assert len(ranks) == 2
        job.kill_agent()
        assert wait_until(lambda: all(map(has_ended, ranks)))


def test_a_second_writer_is_refused(tmp_path):
    refused = pytest.raises(SystemExit, match=r"another run is writing to .*; wait until it ends, or choose")
    with FileLock(tmp_path / ".lock"), refused:
        SCRIPT.take(FileLock(tmp_path / ".lock"), tmp_path)
    SCRIPT.take(FileLock(tmp_path / ".lock"), tmp_path)  # as soon as the first has ended
