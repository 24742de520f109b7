"""Compare a rank's environment under `launch`, torchrun and Slurm, and run torchrun from a cell.

`torchrun ... -m fsdp_helpers.teaching.lessons.torchruns FOLDER` writes the variables that every rank sees to FOLDER.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import IO

import psutil

from fsdp_helpers.gpus import VISIBLE, are_hidden
from fsdp_helpers.progress import ProgressBar, print_above_bar
from fsdp_helpers.teaching.page.show import table

# The variables that every rank needs, and those that only torchrun or Slurm sets.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NODEID", "SLURM_RESTART_COUNT")
VARIABLES = (*RANK_VARIABLES, *TORCHRUN_VARIABLES, *SLURM_VARIABLES)
TIMEOUT_S = 240.0


def launcher_variables() -> dict[str, str]:
    """Return the VARIABLES that are set in this process."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def read_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that a rank sees under `launch`."""
    return launcher_variables()


def write_launcher_variables(folder: Path) -> None:
    """Write this rank's variables to its own file, no matter what started the rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(launcher_variables()))


def compare_environments(environments: dict[str, dict[str, str]]):
    """Show a table with one row per variable and one column per launcher; a dash means that the variable isn't set."""
    rows = [[f"`{name}`", *(environment.get(name, "–") for environment in environments.values())] for name in VARIABLES]
    return table(["variable", *environments], [row for row in rows if set(row[1:]) != {"–"}])


# ---------------------------------------------------------------- torchruns, from a cell


def torchrun_command(*arguments: object) -> list[str]:
    """Return the command `torchrun ARGUMENTS`, with this kernel's interpreter."""
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


@contextmanager
def started(
    *commands: Sequence[str], errors: IO | int = subprocess.STDOUT, **variables: str
) -> Iterator[list[subprocess.Popen]]:
    """Run commands at the same time; when the block ends, terminate any still running, and kill any that don't exit.

    The cell says that they're starting, then that they're running, and at the end how long it took.
    """
    settings = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
    own = [gpu_variables(number) if len(commands) > 1 else {} for number in range(len(commands))]
    processes = [
        subprocess.Popen(command, **settings, env={**os.environ, **gpu, **variables})
        for command, gpu in zip(commands, own, strict=True)
    ]
    bar = ProgressBar()
    try:
        bar.start(" and ".join(map(short_name, commands)))
        for process in processes:
            _wait_until_it_runs(process)
        bar.running()
        yield processes
    finally:
        bar.close()
        for process in processes:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()
            process.wait()
            process.stdout.close()


def short_name(command: Sequence[str]) -> str:
    """Return what a line of progress calls this command: torchrun and the script, if there's one."""
    scripts = [Path(part).name for part in command if part.endswith(".py")]
    return " ".join(["torchrun", *scripts[:1]])


def _wait_until_it_runs(process: subprocess.Popen) -> None:
    """Wait until a torchrun has started its ranks, or prints, or exits."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s and not select([process.stdout], [], [], 0.05)[0]:
        with suppress(psutil.Error):
            if psutil.Process(process.pid).children():
                return


def run_script(num_ranks: int, *script: object) -> str:
    """Run torchrun with a script and its arguments on this machine; print its lines as they come, and return them.

    What it prints to standard error is part of the RuntimeError that's raised if it fails.
    """
    command = torchrun_command("--standalone", "--nproc-per-node", num_ranks, *script)
    lines = []
    with tempfile.TemporaryFile("w+") as errors:
        with started(command, errors=errors, PYTHONUNBUFFERED="1") as (process,):
            for line in process.stdout:
                lines.append(line)
                print_above_bar(line.rstrip("\n"), sys.stdout)
            process.wait(timeout=TIMEOUT_S)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"torchrun exited with status {process.returncode}:\n{errors.read()}")
    return "".join(lines)


def gpu_variables(number: int) -> dict[str, str]:
    """Return the variables that give command `number` a separate GPU, as if it ran on a separate machine."""
    if are_hidden():
        return {}
    chosen = os.environ.get(VISIBLE, "")
    names = chosen.split(",") if chosen else [str(number)]
    return {VISIBLE: names[number % len(names)]}


def run_together(*commands: Sequence[str], **variables: str) -> list[str]:
    """Run commands concurrently and return their outputs; raise RuntimeError if any of them fails."""
    with started(*commands, **variables) as processes:
        return _finish(processes)


def run_and_read_environment(*torchruns: Sequence[str], rank: int = 1) -> tuple[list[str], dict[str, str]]:
    """Run torchrun commands as `run_together` does; return their outputs and the VARIABLES that `rank` saw."""
    with started(*torchruns) as processes:
        given = _wait_for_rank(rank, processes).environ()
        return _finish(processes), {name: given[name] for name in VARIABLES if name in given}


def _finish(processes: Sequence[subprocess.Popen]) -> list[str]:
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"torchrun exited with status {process.returncode}:\n{output}")
    return outputs


def free_port() -> int:
    """Return a port that's free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lines_with(text: str, *parts: str) -> str:
    """Return the lines that contain any of `parts`."""
    return "\n".join(line for line in text.splitlines() if any(part in line for part in parts))


# ---------------------------------------------------------------- a rank is killed


def worker_of(torchrun: subprocess.Popen, rank: int) -> psutil.Process:
    """Return the process of `rank` that `torchrun` started."""
    (found,) = _workers_of(torchrun, rank)
    return found


def _workers_of(torchrun: subprocess.Popen, rank: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(torchrun.pid).children() if child.environ().get("RANK") == str(rank)]


def _wait_for_rank(rank: int, torchruns: Sequence[subprocess.Popen]) -> psutil.Process:
    """Return the process of `rank` once it starts. Raises RuntimeError if a torchrun exits first or takes too long."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        for torchrun in torchruns:
            if torchrun.poll() is not None or time.monotonic() > deadline_s:
                torchrun.terminate()
                raise RuntimeError(f"torchrun didn't start rank {rank}:\n{torchrun.communicate()[0]}")
            with suppress(psutil.Error):  # a child that is just starting, or has just ended
                for found in _workers_of(torchrun, rank):
                    return found
        time.sleep(0.05)


def kill_rank(torchrun: subprocess.Popen, rank: int, *, after: Path) -> str:
    """Kill a rank with SIGKILL as soon as the path `after` exists, then return all of torchrun's output."""
    wait_for(after, torchrun)
    worker_of(torchrun, rank).kill()
    return torchrun.communicate(timeout=TIMEOUT_S)[0]


def wait_for_line(torchrun: subprocess.Popen, beginning: str) -> None:
    """Wait until the run prints a line that starts with `beginning`. Raises RuntimeError if the run exits first."""
    for line in torchrun.stdout:
        if line.startswith(beginning):
            return
    raise RuntimeError(f"the run exited without printing a line that begins with {beginning!r}")


def wait_for(after: Path, torchrun: subprocess.Popen) -> None:
    """Wait until a checkpoint exists. Raises RuntimeError if the run exits too early or takes too long."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not after.exists():
        if torchrun.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the run didn't reach {after.name}:\n{torchrun.communicate()[0]}")
        time.sleep(0.05)


if __name__ == "__main__":
    write_launcher_variables(Path(sys.argv[1]))
