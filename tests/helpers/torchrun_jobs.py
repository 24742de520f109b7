"""Runs under torchrun that tests start, watch, disturb and clear away."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from leftovers import PROJECT
from programs import wait_until

from fsdp_helpers.checkpointing.folder import find_steps

START_S = 240.0  # a job has this long to begin, on a busy machine
END_S = 240.0  # and this long to end
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TRAIN = ("-m", "fsdp_helpers", "train", "--device", "cpu")
SMALL = ["--model", "simple", "--train-images", "1200", "--test-images", "101", "--global-batch-size", "24"]


class Job:
    """A running torchrun, whose output goes to a file."""

    def __init__(self, process: subprocess.Popen, output: Path) -> None:
        self.process, self._output = process, output

    @property
    def output(self) -> str:
        return self._output.read_text()

    def workers(self) -> dict[int, int]:
        """Rank -> process id, of the ranks that run below this torchrun now."""
        return {
            int(environment["RANK"]): pid for pid, environment in _children(self.process.pid) if "RANK" in environment
        }

    def kill_agent(self) -> None:
        """Kill torchrun alone; what becomes of its ranks is up to them."""
        self.process.kill()
        self.process.wait(timeout=END_S)

    def wait(self) -> int:
        """Its exit status; fails where it does not end."""
        return self.process.wait(timeout=END_S)

    def end_machine(self) -> None:
        """As if the power went: the agent and its ranks at once."""
        pids = [self.process.pid, *self.workers().values()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=END_S)


@contextmanager
def torchrun_job(
    options: list[str], arguments: list, folder: Path, *, name: str = "job", program: Sequence = TRAIN, **variables
) -> Iterator[Job]:
    """`torchrun OPTIONS PROGRAM ARGUMENTS`: by default our training, on bundled digits. Nothing outlives the block."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(folder / f"{name}-logs"), *options]
    command = [*torchrun, *map(str, [*program, *arguments])]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "FSDP_OFFLINE": "1", **variables}
    with open(folder / f"{name}.out", "wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    job = Job(process, folder / f"{name}.out")
    try:
        yield job
    finally:
        job.end_machine()


def one_agent(num_ranks: int, *options: str) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(num_ranks), "--monitor-interval", "0.1", *options]


def agents(num_nodes: str, port: int, *options: str) -> list[str]:
    """What each of several torchruns on this host is told; the first to come holds the meeting point."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"localhost:{port}"]
    return ["--nnodes", num_nodes, "--nproc-per-node", "1", "--monitor-interval", "0.1", *meeting, *options]


def wait_for_step(checkpoints: Path, step: int, job: Job) -> None:
    """Until the run has saved `step` or a later one."""
    reached = wait_until(
        lambda: (find_steps(checkpoints) or [0])[-1] >= step or job.process.poll() is not None, START_S
    )
    assert reached and job.process.poll() is None, job.output


def wait_for_new_ranks(earlier: set[int], job: Job) -> set[int]:
    """The process ids of the two ranks of the next start, as soon as those of `earlier` have ended."""
    found: set[int] = set()

    def are_there() -> bool:
        nonlocal found
        found = set(job.workers().values())
        return len(found) == 2 and not found & earlier

    assert wait_until(are_there, START_S), job.output
    return found


def wait_for_output(pattern: str, *jobs: Job) -> tuple[str, ...]:
    """What the groups of `pattern` match, as soon as the jobs have printed it, one job's output after the other's."""

    def printed() -> str:
        return "".join(job.output for job in jobs)

    def found() -> re.Match | None:
        return re.search(pattern, printed())

    wait_until(lambda: found() or any(job.process.poll() is not None for job in jobs), START_S)
    assert found(), printed()
    return found().groups()


def read_losses(path: Path) -> tuple[int, list[float]]:
    """The first step of a record, and the losses from there on."""
    content = json.loads(path.read_text())
    return content["first_step"], content["step_losses"]


def _children(parent: int) -> Iterator[tuple[int, dict[str, str]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                pairs = (folder / "environ").read_bytes().decode().split("\0")
                yield int(folder.name), dict(pair.split("=", 1) for pair in pairs if "=" in pair)
