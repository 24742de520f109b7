"""torchrun's agent, which starts the ranks of a machine: its arguments, signals, rendezvous and end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.utils.file_baton import FileBaton

from fsdp_helpers.teaching.failures.crashes_at_the_ends import answer, answer_of_script
from fsdp_helpers.teaching.failures.entry import Failure, Numbers

# ---------------------------------------------------------------- more ranks than were started


def wait_for_two_processes(rank: int, world_size: int) -> Numbers:
    store = dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=timedelta(seconds=2))
    return {"stores": float(store.port > 0)}


def wait_for_the_one_started(rank: int, world_size: int) -> Numbers:
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, timeout=timedelta(seconds=2))
    return {"stores": float(store.port > 0)}


def one_store() -> Numbers:
    return {"stores": 1.0}


# ---------------------------------------------------------------- an argument that the script doesn't know

PARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
print(42 + parser.parse_args().local_rank)
"""
READ_VARIABLE = "import os; print(42 + int(os.environ['LOCAL_RANK']))"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


def parse_local_rank(rank: int, world_size: int) -> Numbers:
    return answer_of_script(PARSE, "-m", "torch.distributed.launch", *TORCHRUN[2:])


def read_local_rank(rank: int, world_size: int) -> Numbers:
    return answer_of_script(READ_VARIABLE, *TORCHRUN)


# ---------------------------------------------------------------- a terminal that closes

WAIT = """
import pathlib, time
pathlib.Path("began").touch()
time.sleep(1)
print(42)
"""


@contextmanager
def torchrun(script: str, *starter: str, **variables: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Start a script under torchrun, and yield torchrun and its working folder once the script has begun."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script)
        command = [*starter, sys.executable, *TORCHRUN, str(path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        agent = subprocess.Popen(command, cwd=folder, env=os.environ | {"TMPDIR": folder} | variables, **pipes)
        while not Path(folder, "began").exists():
            time.sleep(0.05)
        yield agent, Path(folder)


def answer_after_a_hangup(agent: subprocess.Popen) -> Numbers:
    """Close the terminal of torchrun, as it sees it, and return what its script prints."""
    agent.send_signal(signal.SIGHUP)
    printed, error = agent.communicate()
    if not printed:
        raise RuntimeError(error.strip().splitlines()[-1])
    return {"the worker's answer": float(printed)}


def hang_up(rank: int, world_size: int) -> Numbers:
    with torchrun(WAIT, "nohup") as (agent, _):
        return answer_after_a_hangup(agent)


def hang_up_on_an_agent_without_a_handler(rank: int, world_size: int) -> Numbers:
    with torchrun(WAIT, "nohup", TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGQUIT") as (agent, _):
        return answer_after_a_hangup(agent)


# ---------------------------------------------------------------- ranks that outlive their agent

WRITE = """
import ctypes, itertools, pathlib, time
for step in range(30):
    pathlib.Path("began").write_text(str(step))
    time.sleep(0.1)
"""
END_WITH_AGENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL\n"


def steps_after_a_kill(script: str) -> Numbers:
    """Kill torchrun, and return whether its rank goes on."""
    with torchrun(script) as (agent, folder):
        agent.kill()
        agent.communicate()
        before = (folder / "began").read_text()
        time.sleep(1)
        return {"ranks that still write": float((folder / "began").read_text() != before)}


def leave_ranks_behind(rank: int, world_size: int) -> Numbers:
    return steps_after_a_kill(WRITE)


def end_ranks_with_the_agent(rank: int, world_size: int) -> Numbers:
    return steps_after_a_kill(END_WITH_AGENT + WRITE)


def no_rank() -> Numbers:
    return {"ranks that still write": 0.0}


# ---------------------------------------------------------------- a rendezvous that is over


def meet_under(run_id: str, store: dist.Store) -> RendezvousHandler:
    """Return a node's rendezvous under an id, as torchrun creates it from `--rdzv-id`."""
    settings = {"join_timeout": 3, "last_call_timeout": 1}
    return create_handler(
        store,
        C10dRendezvousBackend(store, run_id),
        RendezvousParameters("c10d", "localhost:0", run_id, min_nodes=1, max_nodes=2, **settings),
    )


def join_a_finished_job(rank: int, world_size: int) -> Numbers:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = meet_under("job-7", store)
    first.next_rendezvous()
    first.set_closed()  # the first job has ended
    return {"nodes": meet_under("job-7", store).next_rendezvous().world_size}


def join_under_a_new_id(rank: int, world_size: int) -> Numbers:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = meet_under("job-7", store)
    first.next_rendezvous()
    first.set_closed()  # the first job has ended
    return {"nodes": meet_under("job-8", store).next_rendezvous().world_size}


def one_node() -> Numbers:
    return {"nodes": 1}


# ---------------------------------------------------------------- a lock file that a killed build left behind


def build_extension(folder: Path) -> None:
    """Build an extension under a lock file, as `torch.utils.cpp_extension.load` does."""
    baton = FileBaton(folder / "lock")
    if not baton.try_acquire():
        baton.wait()
        return
    (folder / "extension.so").touch()
    baton.release()


def wait_for_a_killed_build(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lock").touch()  # of a build that was killed
        build_extension(Path(folder))
        return {"extensions": len(list(Path(folder).glob("*.so")))}


def remove_its_lock_first(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lock").touch()  # of a build that was killed
        Path(folder, "lock").unlink()
        build_extension(Path(folder))
        return {"extensions": len(list(Path(folder).glob("*.so")))}


def one_extension() -> Numbers:
    return {"extensions": 1}
