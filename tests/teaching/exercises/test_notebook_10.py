"""The build exercise of notebook 10: a job script, run with stand-ins for Slurm and torchrun."""

import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from leftovers import PROJECT
from torch.distributed.run import get_args_parser

from fsdp_helpers.teaching.exercises.answers import NotYet
from fsdp_helpers.teaching.exercises.notebook_10 import check_job_script, read_directives, seconds_of

NOTEBOOK = PROJECT / "notebooks" / "10_many_machines.ipynb"
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```bash\n(.*?)```", re.DOTALL)


def exercise() -> tuple[str, str, str]:
    """The starter, the folded solution and the call of the checker, as the notebook has them."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    for text, starter, check in zip(cells, cells[1:], cells[2:], strict=False):
        magic, _, code = starter.source.partition("\n")
        if starter.cell_type == "code" and magic == "%%writefile job.sbatch":
            (solution,) = SOLUTION.findall(text.source)
            return code, solution, check.source
    raise AssertionError("the notebook has no such exercise")


STARTER, SOLVED, CALL = exercise()
# SIGTERM instead of SIGUSR1, handed on by srun; a port from Python; the one torchrun per node asked for by number.
ANOTHER_WAY = """#!/usr/bin/env bash
#SBATCH -p a100 -A nobody
#SBATCH -p a100
#SBATCH -A vision
#SBATCH -N 4
#SBATCH --ntasks-per-node 1
#SBATCH --gres=gpu:a100:4
#SBATCH -t 0-01:30
#SBATCH --requeue
#SBATCH --signal=B:TERM@600
nodes=($(scontrol show hostnames "$SLURM_NODELIST"))
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun -n "$SLURM_NNODES" python -m torch.distributed.run --nnodes "$SLURM_NNODES:$SLURM_NNODES" --nproc_per_node=gpu \\
    SHUTDOWN --max-restarts=2 --rdzv_backend=c10d \\
    --rdzv_id="$SLURM_JOBID" --rdzv_endpoint="${nodes[0]}:$((10000 + SLURM_JOBID % 50000))" train.py &
step=$!
on_limit() { kill -TERM "$step"; wait "$step"; scontrol requeue "$SLURM_JOBID"; exit 0; }
trap on_limit TERM
wait "$step"
"""
if "--shutdown-timeout" in get_args_parser().format_help():
    ANOTHER_WAY = ANOTHER_WAY.replace("SHUTDOWN", "--shutdown-timeout=600")
else:  # torch 2.11 has only the variable
    ANOTHER_WAY = ANOTHER_WAY.replace("    SHUTDOWN ", "    ").replace(
        "export ", "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 "
    )


@pytest.fixture
def check(tmp_path):
    def check(text: str) -> str:
        path = tmp_path / "job.sbatch"
        path.write_text(text)
        return check_job_script(str(path))

    return check


def changed(*changes: tuple[str, str]) -> str:
    text = SOLVED
    for old, new in changes:
        assert old in text, f"{old!r} is not in the solution"
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("text", [SOLVED, ANOTHER_WAY], ids=["folded", "another way"])
def test_right_scripts_are_accepted(check, text):
    assert check(text).startswith("Right")


def test_the_script_to_submit_does_what_the_exercise_asks_for(check):
    text = (PROJECT / "notebooks" / "cluster" / "train.sbatch").read_text()
    edits = [("partition=EDIT_ME", "partition=a100"), ("account=EDIT_ME", "account=vision"), ("USR1@180", "USR1@300")]
    edits += [("nodes=2", "nodes=4"), ("##SBATCH --gpus-per-node=8", "#SBATCH --gpus-per-node=4"), ("04:", "02:")]
    edits += [('bash "$@" &', "bash train.py &")]  # what `sbatch train.sbatch train.py` hands on
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    assert check(text).startswith("Right")


def test_the_script_to_submit_ties_its_seconds_and_hands_on_its_cores(tmp_path):
    """The seconds of the signal are torchrun's for ranks that save; they stand in one line."""
    script = (PROJECT / "notebooks" / "cluster" / "train.sbatch").read_text()
    assert "--signal=B:USR1@180 " in script and re.search(r"^#SBATCH --cpus-per-task=\d+ ", script, re.MULTILINE)
    (tmp_path / "train.sbatch").write_text(script.replace("USR1@180", "USR1@240"))
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho gpu-0\n")
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $SRUN_CPUS_PER_TASK"\n')
    for stand_in in ("scontrol", "srun"):
        (tmp_path / stand_in).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "12"}
    done = subprocess.run(
        ["bash", tmp_path / "train.sbatch"], env=variables, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("240 12\n", "")


WAITING = "while wait $!; status=$?; kill -0 $! 2>/dev/null; do :; done\n"
QUEUED_EARLY = "the script requeued the job while ranks were saving, which kills them: srun has to exit first"
WRONG = [
    ([("partition=a100", "partition=a40")], "--partition: a40 is given; it should be a100"),
    ([("--gpus-per-node=4", "--gpus-per-node=8")], "the script requests 8 GPUs per node; each node has 4"),
    ([("02:00:00", "1-00:00:00")], "the partition allows at most two hours"),
    ([("#SBATCH --requeue\n", "")], "which option requeues the job"),
    ([("B:USR1@300", "USR1@300")], "the script's shell has to get a signal before the time limit"),
    ([("B:USR1@300", "B:USR1@60")], "60 s before the limit is too late; the ranks need 300 s"),
    ([("--ntasks-per-node=1", "--ntasks-per-node=4")], "16 torchruns were started; srun should start one on"),
    ([("srun torchrun", "torchrun")], "1 torchruns were started"),
    ([("$((20000 + SLURM_JOB_ID % 10000))", "29500")], "two jobs use the port in gpu-0:29500"),
    ([("$((20000 + SLURM_JOB_ID % 10000))", "$SLURM_JOB_ID")], "the port has to be between 1024 and 65535"),
    ([("$first:", "localhost:")], "the meeting point has to be one of the job's nodes"),
    ([("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n", "")], "gives each restart its own store"),
    ([("RDZV_TCP_STORE=1", "RDZV_TCP_STORE=0")], "gives each restart its own store"),
    ([("--max-restarts=3 ", "")], "torchrun restarts no ranks; which option"),
    # torchrun takes the last one, and after a script's name all belongs to the script
    ([("--max-restarts=3", "--nnodes=1 --max-restarts=3")], "torchrun --nnodes is 1; it should be 4 or 4:4"),
    (
        [('"$SLURM_JOB_NUM_NODES"', "4")],
        "submitted with sbatch --nodes=2: torchrun --nnodes is 4; it should be 2 or 2:2",
    ),
    ([('"$first:$((20000 + SLURM_JOB_ID % 10000))"', '"127.0.0.1:1"'), ("c10d", "static")], "rdzv-backend is static"),
    # each node's own name, looked up where torchrun runs
    (
        [("srun torchrun", "srun bash -c 'torchrun"), ("$first:", "$(hostname):"), ("train.py &", "train.py' &")],
        "one torchrun waits at gpu-0:.* and another at gpu-1:.*, so they never meet",
    ),
    ([('requeue "$SLURM_JOB_ID"', "requeue 1")], "the job wasn't requeued; use scontrol requeue with the job's ID"),
    ([("exit $status", "exit 1")], "every torchrun succeeded, but the script exited with status 1"),
    ([("$first:", "gpu-0:")], "submitted with sbatch --nodes=2: .* the meeting point has to be one of the job's nodes"),
    ([("--max-restarts=3", "--max-restart=three")], "torchrun doesn't accept its arguments: .*invalid int value"),
    (
        [("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300\n", "")],
        "kills ranks 30 s after SIGTERM, but they have 300 s to save",
    ),
    ([("train.py &\n", "train.py\n"), ("wait $!", "true")], "0 of 2 torchruns got SIGTERM.*only between commands"),
    # in the trap, before srun has exited
    ([('"$SLURM_JOB_ID"\' USR1', '"$SLURM_JOB_ID"; scontrol requeue "$SLURM_JOB_ID"\' USR1')], QUEUED_EARLY),
    ([(WAITING, "wait $!; status=$?\n")], QUEUED_EARLY),
    ([(WAITING, "wait $!\nexit $?\n")], "the script exited while ranks were saving, which kills them: srun has to"),
    ([('[ -z "$out_of_time" ] || ', "")], "training had finished, but the script requeued the job"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_wrong_scripts_are_refused_in_one_line(check, changes, message):
    with pytest.raises(NotYet, match=message) as refused:
        check(changed(*changes))
    assert len(str(refused.value).splitlines()) == 1


LAZY = SOLVED.partition("\nexport")[0] + "\nexit 0\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (STARTER, "#SBATCH --partition: nothing is given"),
        (LAZY, "0 torchruns were started"),
        ("echo\n", "the first line has to name the shell"),
    ],
)
def test_the_starter_and_lazy_ones_are_refused(check, text, message):
    with pytest.raises(NotYet, match=message):
        check(text)


def test_a_script_that_is_not_there():
    with pytest.raises(NotYet, match="there is no job.sbatch here; run the cell that writes it"):
        check_job_script("job.sbatch")
    with pytest.raises(NotYet, match="it should be the name of your script"):
        check_job_script(Path("job.sbatch"))


def test_the_notebook_calls_the_checker():
    assert 'check_job_script("job.sbatch")' in CALL


@pytest.mark.parametrize(
    "limit, seconds",
    [("90", 5_400), ("90:30", 5_430), ("02:00:00", 7_200), ("1-12", 129_600), ("0-01:30", 5_400)],
)
def test_time_limits_as_slurm_reads_them(limit, seconds):
    assert seconds_of(limit) == seconds


def test_directives_end_with_the_first_command():
    text = "#!/bin/bash\n#SBATCH -N 2  # two\n\n##SBATCH --time=1\ntrue\n#SBATCH --nodes=8\n"
    assert read_directives(text) == {"nodes": "2"}
