"""Checker of a job script: it reads the directives, and runs the script with stand-ins for Slurm and torchrun.

Any script that would do the right thing on a cluster passes, however it's written.
"""

import re
import shlex
from pathlib import Path

from fsdp_helpers.teaching.exercises.answers import exercise, expect
from fsdp_helpers.teaching.exercises.job_runs import GPUS, Done, run_script

NODES = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")  # of the job as its script asks for it
FEWER = ("gpu-5", "gpu-7")  # of the same script, submitted with `sbatch --nodes=2`
PARTITION, ACCOUNT = "a100", "vision"
LONGEST_S, LEAD_S = 2 * 3600, 300  # of a job, and from the signal to the time limit
SHORT_OPTIONS = {"-p": "partition", "-A": "account", "-N": "nodes", "-t": "time", "-n": "ntasks", "-J": "job-name"}


@exercise("10")
def check_job_script(path: str) -> str:
    """Notebook 10: a job of four nodes with four GPUs each, which saves before its time limit and then continues."""
    expect(isinstance(path, str), f"the answer is {path!r}; it should be the name of your script, as a string")
    expect(Path(path).is_file(), f"there is no {path} here; run the cell that writes it")
    text = Path(path).read_text()
    expect(text.startswith("#!"), "the first line has to say which shell runs the script: #!/bin/bash")
    told = read_directives(text)
    _check_directives(told)
    first = _run_to_its_end(path, told, job=4_242_001)
    _check_torchruns(first, NODES)
    second = _run_out_of_time(path, told, job=4_242_017)
    _check_torchruns(second, FEWER)
    expect(
        first.endpoint.rpartition(":")[2] != second.endpoint.rpartition(":")[2],
        f"two jobs meet at {first.endpoint}: on a shared node, they would join each other; derive the port from the "
        "job",
        "crash-port-in-use",
    )
    return (
        "Right: four torchruns that meet at the job's own port, a checkpoint before the limit, and a job that "
        "continues."
    )


# ---------------------------------------------------------------- what the script tells Slurm


def read_directives(text: str) -> dict[str, str]:
    """Return the options of the #SBATCH lines above the first command, by their long names."""
    told = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH ") else []
        for word, after in zip(words, [*words[1:], "-"], strict=False):
            name, _, value = word.partition("=")
            if word.startswith("-"):
                told[SHORT_OPTIONS.get(name, name.lstrip("-"))] = value or ("" if after.startswith("-") else after)
    return told


def seconds_of(limit: str) -> int:
    """Read a time limit as Slurm does: minutes, minutes:seconds, hours:minutes:seconds, days-hours:minutes:seconds."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *(parts + [0])[:2])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_directives(told: dict[str, str]) -> None:
    for name, wanted in (("partition", PARTITION), ("account", ACCOUNT), ("nodes", str(len(NODES)))):
        given = told.get(name)
        expect(given == wanted, f"#SBATCH --{name}: {given or 'nothing'} is given; it should be {wanted}")
    gpus = told.get("gpus-per-node") or told.get("gres", "").removeprefix("gpu")
    expect(
        gpus.rpartition(":")[2] == str(GPUS),
        f"#SBATCH: {gpus or 'no'} GPUs per node are requested; each node has {GPUS}: --gpus-per-node",
    )
    limit = told.get("time", "")
    expect(bool(re.fullmatch(r"[\d:-]*\d", limit)), "#SBATCH --time: the job needs a time limit")
    expect(seconds_of(limit) <= LONGEST_S, f"#SBATCH --time={limit}: the partition allows two hours")
    expect("requeue" in told, "#SBATCH: the loss of a node would end the job; which option queues it again?")
    found = re.fullmatch(r"B:(?:SIG)?([A-Z]+\d?|\d+)@(\d+)", told.get("signal", ""))
    expect(
        found is not None,
        "#SBATCH --signal: this shell has to get a signal before the time limit, with B:NAME@SECONDS",
    )
    expect(int(found[2]) >= LEAD_S, f"#SBATCH --signal: {found[2]} s before the limit; saving takes up to {LEAD_S} s")


# ---------------------------------------------------------------- what the script does


def _run_to_its_end(path: str, told: dict[str, str], job: int) -> Done:
    done, status = run_script(path, told, job, NODES, ends=True)
    _expect_one_per_node(done, NODES)
    expect(status == 0, f"every torchrun succeeded, but the script exited with status {status}")
    expect("scontrol requeue" not in done.calls, "the training was finished, but the script requeued the job")
    return done


def _run_out_of_time(path: str, told: dict[str, str], job: int) -> Done:
    """Run the script as if submitted with fewer nodes, with different names, until its time is up."""
    done, _ = run_script(path, told, job, FEWER, ends=False)
    _expect_one_per_node(done, FEWER)
    expect(
        done.num_asked == len(FEWER),
        f"at {told['signal']} {done.num_asked} of {len(FEWER)} torchruns got SIGTERM, which makes ranks save; "
        "bash runs a trap only between commands, or while it waits",
    )
    queued = "scontrol requeue" in done.calls
    expect(
        not done.left_early,
        f"the script {'requeued the job' if queued else 'ended'} while ranks were saving, which stops them: srun "
        "has to end first, and a signal ends bash's `wait` before that",
    )
    expect(
        f"scontrol requeue {job}" in done.calls,
        "time ran out, and the job wasn't requeued: scontrol requeue, with its ID",
    )
    return done


def _expect_one_per_node(done: Done, nodes: tuple[str, ...]) -> None:
    expect(
        len(done.torchruns) == len(nodes),
        f"{len(done.torchruns)} torchruns were started; {len(nodes)} nodes need one each, which srun starts",
    )


def _check_torchruns(done: Done, nodes: tuple[str, ...]) -> None:
    says = "" if nodes == NODES else f"submitted with sbatch --nodes={len(nodes)}: "
    num_nodes, on_each = str(len(nodes)), ("gpu", "auto", str(GPUS))
    for torchrun in done.torchruns:
        options = torchrun.options
        for name, given, right in (
            ("nnodes", options.nnodes, (num_nodes, f"{num_nodes}:{num_nodes}")),
            ("nproc-per-node", options.nproc_per_node, on_each),
            ("rdzv-backend", options.rdzv_backend, ("c10d",)),
        ):
            expect(given in right, f"{says}torchrun --{name} is {given}; {' or '.join(right)} is needed")
        endpoint = options.rdzv_endpoint
        expect(endpoint == done.endpoint, f"torchruns that meet at {done.endpoint} and {endpoint} never meet")
        host, _, port = endpoint.partition(":")
        expect(
            host in nodes,
            f"{says}torchrun --rdzv-endpoint={endpoint}: the meeting point has to be one of the job's nodes",
        )
        expect(
            port.isdigit() and 1024 <= int(port) < 65_536,
            f"torchrun --rdzv-endpoint={endpoint}: a port from 1024 to 65535 is needed",
        )
        expect(
            options.max_restarts == 0 or torchrun.fresh_store == "1",
            f"torchrun --max-restarts={options.max_restarts}: which variable gives each restart its own store?",
        )
        expect(
            torchrun.shutdown_s.isdigit() and int(torchrun.shutdown_s) >= LEAD_S,
            f"torchrun kills ranks {torchrun.shutdown_s} s after SIGTERM; saving takes up to {LEAD_S} s, and which "
            "variable tells it?",
        )
