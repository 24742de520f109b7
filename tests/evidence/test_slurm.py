"""The job script of notebooks/cluster on a real Slurm of two nodes, started for these tests and gone after them."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import slurm as cluster
from leftovers import PROJECT
from needs import need
from programs import wait_until
from torchrun_jobs import SMALL, read_losses

from fsdp_helpers.checkpointing.folder import find_steps
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.teaching.lessons.torchruns import torchrun_command
from fsdp_helpers.training.run import train

SCRIPT = PROJECT / "notebooks" / "cluster" / "train.sbatch"
TAKE_HOME = PROJECT / "notebooks" / "take_home"
SHARDED = [*SMALL, "--strategy", "fsdp-auto-wrap", "--device", "cpu"]
SETTINGS = {"model": "simple", "train_images": 1_200, "test_images": 101, "global_batch_size": 24}
# This copy of the package, and data that are everywhere.
VARIABLES = {"PYTHONPATH": str(PROJECT), "FSDP_OFFLINE": "1"}
# Up to its last digit: torchrun's ranks write a line and its end one after the other, and its mark may come in between.
LOSS = re.compile(r"step (\d+)  loss (\d+\.\d{7})")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One cluster for the tests that leave its nodes alone."""
    need(cluster.missing())
    with cluster.running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(running):
    """The cluster, as soon as it has nothing to do: also after a test that failed."""
    jobs = running.run("squeue", "--noheader", "--format=%i").split()
    if jobs:
        running.run("scancel", *jobs)
    running.wait_for_nodes()
    return running


@pytest.fixture
def undisturbed(digits_dir):
    def run(num_steps: int) -> list[float]:
        settings = SETTINGS | {"epochs": 100, "max_steps": num_steps, "data_dir": str(digits_dir)}
        config = TrainConfig(**settings, strategy="fsdp-auto-wrap")
        return list(train(config, world_size=2, device="cpu").step_losses)

    return run


def output(folder: Path, job: str) -> str:
    """What the job has printed so far; nothing, before it starts."""
    path = folder / f"train-{job}.out"
    return path.read_text() if path.exists() else ""


def test_two_nodes_learn_what_two_ranks_of_launch_learn(slurm, undisturbed, tmp_path):
    """Twenty steps, to the last bit; and a log of each rank, by its node."""
    arguments = ["-m", "fsdp_helpers", "train", *SHARDED, "--max-steps", 20, "--json", tmp_path / "run.json"]
    job = slurm.submit(SCRIPT, *arguments, folder=tmp_path, **VARIABLES)
    slurm.wait_for(job, "COMPLETED")
    assert read_losses(tmp_path / "run.json") == (0, undisturbed(20))
    for node in (0, 1):
        (log,) = (tmp_path / "logs" / job / f"node-{node}").rglob("stdout.log")
        assert log.parent.name == "0"  # the rank within its node
    assert output(tmp_path, job).count("epoch 1:") == 1


def test_the_time_limit_ends_in_a_checkpoint_and_the_job_goes_on(slurm, tmp_path):
    """The take-home script, unchanged: Slurm's own signal, a checkpoint, the queue, and the rest of the steps.

    The limit comes near only when the ranks train, however long that takes to begin.
    """
    options = ("--time=60", "--signal=B:USR1@600")
    job = slurm.submit(
        SCRIPT, TAKE_HOME / "checkpoint.py", tmp_path / "run", 10**6, folder=tmp_path, options=options, **VARIABLES
    )
    losses_by_step(slurm, tmp_path, job, more_than=5)
    slurm.set_limit(job, minutes=10)
    slurm.wait_for(job, "PENDING")
    (saved,) = [int(path.parent.name) for path in (tmp_path / "run").glob("*/.metadata")]
    slurm.set_limit(job, minutes=60)
    slurm.go_on(job)
    slurm.wait_for(job, "RUNNING")
    steps = losses_by_step(slurm, tmp_path, job, more_than=saved + 5)
    slurm.run("scancel", job)
    assert 0 < saved and sorted(steps) == list(range(max(steps) + 1))  # each step once, none twice
    expected = run_undisturbed(tmp_path, saved + 5)
    assert {step: steps[step] for step in range(saved + 5)} == expected


def test_a_job_that_is_asked_to_end_saves_and_the_next_one_goes_on(slurm, tmp_path):
    """SIGTERM from `scancel`, which queues nothing again: whoever asked submits the next job."""
    take_home = [TAKE_HOME / "checkpoint.py", tmp_path / "run"]
    job = slurm.submit(SCRIPT, *take_home, 10**6, folder=tmp_path, **VARIABLES)
    losses_by_step(slurm, tmp_path, job, more_than=5)
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(job, "FAILED")  # what torchrun calls a run that was ended early
    (saved,) = [int(path.parent.name) for path in (tmp_path / "run").glob("*/.metadata")]
    before = losses_by_step(slurm, tmp_path, job, more_than=0)
    following = slurm.submit(SCRIPT, *take_home, saved + 5, folder=tmp_path, **VARIABLES)
    slurm.wait_for(following, "COMPLETED")
    after = losses_by_step(slurm, tmp_path, following, more_than=0)
    assert sorted(before) == list(range(saved)) and sorted(after) == list(range(saved, saved + 5))
    assert before | after == run_undisturbed(tmp_path, saved + 5)


def run_undisturbed(folder: Path, num_steps: int) -> dict[int, float]:
    """The same script on two ranks of this machine that nothing happens to, one thread each."""
    logs = ["--log-dir", folder / "undisturbed-logs"]
    script = [TAKE_HOME / "checkpoint.py", folder / "other", num_steps]
    command = torchrun_command("--standalone", "--nproc-per-node=2", *logs, *script)
    environment = {**os.environ, **VARIABLES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {int(step) - 1: float(loss) for step, loss in LOSS.findall(done.stdout)}


def losses_by_step(slurm, folder: Path, job: str, more_than: int) -> dict[int, float]:
    """Steps taken before -> loss, from the lines of rank 0, as soon as there are enough of them."""

    def found() -> list[tuple[str, str]]:
        return LOSS.findall(output(folder, job))

    assert wait_until(lambda: len(found()) > more_than), output(folder, job)[-3000:]
    lines = found()  # once, since a job that runs writes more
    assert len(dict(lines)) == len(lines)
    return {int(step) - 1: float(loss) for step, loss in lines}


def test_a_lost_node_requeues_the_job_and_it_resumes(undisturbed, tmp_path):
    """With a cluster of its own, since the controller may keep later jobs waiting for a node that it has lost once."""
    need(cluster.missing())
    saving = ["--checkpoint-dir", tmp_path / "run", "--checkpoint-every", 5, "--resume"]
    arguments = ["-m", "fsdp_helpers", "train", *SHARDED, "--epochs", 100, "--max-steps", 400, *saving]
    with cluster.running_slurm(tmp_path / "cluster") as slurm:
        job = slurm.submit(SCRIPT, *arguments, "--json", tmp_path / "run.json", folder=tmp_path, **VARIABLES)
        assert wait_until(lambda: find_steps(tmp_path / "run")), slurm.show(job)
        slurm.lose_node(1)
        slurm.wait_for(job, "PENDING")
        slurm.start_node(1)
        slurm.go_on(job)
        slurm.wait_for(job, "COMPLETED")
    first_step, losses = read_losses(tmp_path / "run.json")
    assert first_step > 0 and losses == undisturbed(400)[first_step:]
