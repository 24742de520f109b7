"""The job scripts of notebooks/cluster, run with stand-ins of a line each; tests/evidence has a real Slurm."""

import os
import subprocess

import pytest
import yaml
from leftovers import PROJECT

SCRIPTS = PROJECT / "notebooks" / "cluster"
# The time is up at once: srun signals the script, as Slurm would, and its ranks replace their checkpoint or don't.
STAND_INS = {
    "srun": 'kill -USR1 $PPID; sleep 0.3; [ "$SAVES" = no ] || { rm -rf run; mkdir -p "run/$SAVES"; }; exit 1',
    "scancel": "true",
    "scontrol": 'if [ "$1" = requeue ]; then echo "requeued $2"; else echo gpu-0; fi',
}


@pytest.fixture
def submit(tmp_path):
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(saves: str, *more: str, folder: str = "run") -> tuple[int, str, str]:
        variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAVES": saves}
        variables |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"}
        command = ["bash", SCRIPTS / "train.sbatch", "train.py", folder, "1000", *more]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_job_that_runs_out_of_time_without_a_checkpoint_is_queued_once_more_only(submit):
    assert submit(saves="no") == (1, "requeued 7\n", "")
    status, said, why = submit(saves="no")
    assert (status, said) == (1, "") and why.startswith("Not queued again: out of time twice without a new checkpoint")


@pytest.mark.parametrize(
    "names", [("000020", "000040"), ("step-00000020", "step-00000040")], ids=["checkpoint.py", "others"]
)
@pytest.mark.parametrize("folder", ["run", "--out=run", "--checkpoint-dir=run"])
def test_a_job_that_saves_is_queued_each_time(names, folder, submit):
    for saves in ("no", names[0], "no", names[1]):  # a checkpoint gives the next try its second chance back
        assert submit(saves, folder=folder)[1] == "requeued 7\n"


def test_folders_of_data_do_not_hide_a_checkpoint(submit, tmp_path):
    """Images often lie in a folder per class, whose names are numbers too."""
    (tmp_path / "images" / "7").mkdir(parents=True)
    (tmp_path / "test-images" / "7").mkdir(parents=True)
    for saves in ("no", "000020", "no", "000040"):
        assert submit(saves, "images", "test-images")[1] == "requeued 7\n"


def test_the_job_script_asks_for_a_nodes_memory_and_names_the_network():
    text = (SCRIPTS / "train.sbatch").read_text()
    assert "\n#SBATCH --mem=0 " in text and "NCCL_SOCKET_IFNAME=" in text


def test_the_kubernetes_job_restarts_all_pods_gives_a_save_its_time_and_shares_memory():
    """No cluster has tried it, and its text says so. Two defaults would restart a failed pod alone, and the others wait."""
    text = (SCRIPTS / "trainjob.yaml").read_text()
    runtime, job = yaml.safe_load_all(text)
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob") and "haven't run this" in text
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "checkpoint.py /shared/run" in job["spec"]["trainer"]["args"][0]
    jobs = runtime["spec"]["template"]["spec"]
    replicated = jobs["replicatedJobs"][0]["template"]["spec"]
    pod = replicated["template"]["spec"]
    assert (jobs["failurePolicy"], replicated["backoffLimit"], pod["restartPolicy"]) == ({"maxRestarts": 3}, 0, "Never")
    env = {pair["name"]: pair["value"] for pair in pod["containers"][0]["env"]}
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(pod["terminationGracePeriodSeconds"])
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    (name,) = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    assert {"name": name, "emptyDir": {"medium": "Memory"}} in pod["volumes"]  # by default, 64 MB
