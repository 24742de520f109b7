"""Failures of torchrun's agent, which starts a machine's ranks: arguments, signals, rendezvous and shutdown."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

POLL_S = 0.1
STEPS = """
import pathlib, time
for step in range({num_steps}):
    pathlib.Path("step").write_text(str(step))
    time.sleep(0.5)
"""


@contextmanager
def torchrun(script: str, *flags: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Start a script under torchrun with nohup; once the script runs, yield torchrun's process and working folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script)
        command = ["nohup", sys.executable, *TORCHRUN, *flags, str(path)]
        with Path(folder, "output").open("w") as output:
            variables = os.environ | {"TMPDIR": folder}
            agent = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
        while not Path(folder, "step").exists():
            time.sleep(POLL_S)
        yield agent, Path(folder)


def last_step_after_a_hangup(*flags: str) -> Numbers:
    """Send torchrun a SIGHUP, as a closing terminal does, and return the last step that the script reached."""
    with torchrun(STEPS.format(num_steps=5), *flags) as (agent, folder):
        agent.send_signal(signal.SIGHUP)
        if agent.wait():
            raise RuntimeError((folder / "output").read_text().strip().splitlines()[-1])
        return {"last step": float((folder / "step").read_text())}


def hang_up(rank: int, world_size: int) -> Numbers:
    return last_step_after_a_hangup()


def hang_up_without_a_handler(rank: int, world_size: int) -> Numbers:
    return last_step_after_a_hangup("--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT")


def fourth_step() -> Numbers:
    return {"last step": 4}


# ---------------------------------------------------------------- ranks that outlive their agent

END_WITH_AGENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL\n"


def is_writing_after_a_kill(script: str) -> Numbers:
    """Kill torchrun, and return whether its rank is still writing a second later."""
    with torchrun(script) as (agent, folder):
        agent.kill()
        agent.wait()
        before = (folder / "step").read_text()
        time.sleep(1)
        return {"ranks that still write": float((folder / "step").read_text() != before)}


def leave_ranks_behind(rank: int, world_size: int) -> Numbers:
    return is_writing_after_a_kill(STEPS.format(num_steps=50))


def end_ranks_with_their_agent(rank: int, world_size: int) -> Numbers:
    return is_writing_after_a_kill(END_WITH_AGENT + STEPS.format(num_steps=50))


def no_rank() -> Numbers:
    return {"ranks that still write": 0.0}


# ---------------------------------------------------------------- a rendezvous that is over


def meet_under(run_id: str, store: dist.Store) -> RendezvousHandler:
    """Return a node's rendezvous handler for a run ID, as torchrun creates it from `--rdzv-id`."""
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
    """Build an extension while holding a lock file, as `torch.utils.cpp_extension.load` does."""
    baton = FileBaton(folder / "lock")
    if not baton.try_acquire():
        baton.wait()
        return
    (folder / "extension.so").touch()
    baton.release()


def wait_for_a_killed_build(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            Path(folder, "lock").touch()  # a build on this node was killed
        build_extension(Path(folder))
        dist.barrier()
        return {"extensions": len(list(Path(folder).glob("*.so")))}


def remove_its_lock_first(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            Path(folder, "lock").touch()  # a build on this node was killed
        Path(folder, "lock").unlink(missing_ok=True)
        build_extension(Path(folder))
        dist.barrier()
        return {"extensions": len(list(Path(folder).glob("*.so")))}


def one_extension() -> Numbers:
    return {"extensions": 1}


AGENTS = (
    Failure(
        name="hang-wrong-world-size",
        title="The group waits for ranks that never join",
        why=(
            "The world size doesn't match the number of processes that were started. Maybe a node is missing, "
            "`--nnodes` differs between machines, Slurm started one task instead of eight, or a second job's ranks are "
            "counted as part of this job."
        ),
        tell=(
            "*1/2 clients joined* means that ranks are missing. An older message has `worker_count` and `world_size` "
            "instead: if `worker_count` is larger, two jobs share an address and port, or this job reuses an old "
            "`--rdzv-id` or file store."
        ),
        fix=(
            "Start exactly nnodes × nproc-per-node processes, and pass the same two values on all machines. On Slurm, "
            "use `srun --ntasks-per-node=1` in front of torchrun, or `--ntasks-per-node=8` without torchrun. Give each "
            "job its own `--rdzv-id` and port."
        ),
        messages=(
            "seconds waiting for clients. 1/2 clients joined",
            "clients joined",
            "waiting for clients",
        ),
        behavior=(
            (
                "the training halts forever without any notification under Slurm; SLURM_LOCALID, SLURM_PROCID, "
                "SLURM_NTASKS"
            ),
            "stuck at the start under Slurm: every process is global rank 0 or 1; both nodes start the same ranks",
            "the job waits forever for the other nodes or processes to join",
            "hangs at initializing distributed; MEMBER 1/4 appears twice",
            "waits for more ranks than were started: nnodes, num_machines, num_processes or ntasks doesn't match",
            "Slurm: --ntasks-per-node is wrong, so srun starts one process, or starts torchrun eight times per node",
            "torchrun hangs until all nodes have joined; one node is missing or has the wrong node_rank",
            "a leftover file from file:// initialization",
        ),
        quotes={
            "torch/distributed/distributed_c10d.py": (
                "Timed out initializing process group in store based barrier on rank",
            ),
            "an older PyTorch": (
                "Waiting in store based barrier to initialize process group for rank",
                "worker_count=",
                "the number of ranks is inconsistent with",
            ),
            "pytorch-lightning#6206": (
                "initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/4",
                "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4",
                "store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)",
            ),
            "pytorch-lightning": (
                "but the number of tasks per node configured in SLURM",
                "does not match with the number of tasks",
            ),
        },
        broken=wait_for_two_processes,
        fixed=wait_for_the_one_started,
        right=one_store,
        says="1/2 clients joined",
        stall_s=30.0,  # far above the two seconds in which nothing moves here
    ),
    Failure(
        name="crash-local-rank-argument",
        title="unrecognized arguments: --local-rank",
        why=(
            "`torch.distributed.launch` passes `--local-rank=N` to the script, spelled with a hyphen since PyTorch "
            "2.0. torchrun doesn't pass this argument; it sets environment variables instead."
        ),
        tell="The script parses `--local_rank`, and it's started with `python -m torch.distributed.launch`.",
        fix=(
            "Start the script with torchrun and read `int(os.environ['LOCAL_RANK'])`, or accept both spellings: "
            "`parser.add_argument('--local-rank', '--local_rank', type=int)`."
        ),
        messages=(
            "error: unrecognized arguments: --local-rank=5",
            "unrecognized arguments: --local-rank",
        ),
        behavior=(
            "argument parsing fails with --local_rank in PyTorch 2.0 and later",
            "local_rank isn't passed to the script anymore; torchrun and --local-rank; argparse",
        ),
        quotes={
            "a run on the CPU": (
                "error: unrecognized arguments: --local_rank=0",
                "the following arguments are required: --local_rank",
                "failed (exitcode: 2) local_rank: 0",
                "torch.distributed.launch is deprecated",
                "The module torch.distributed.launch is deprecated",
            ),
            "an older PyTorch": ("please change it to read from `os.environ('LOCAL_RANK')` instead",),
            "transformers": ("Some specified arguments are not used by the HfArgumentParser: ['--local",),
        },
        broken=parse_local_rank,
        fixed=read_local_rank,
        right=answer,
        says="unrecognized arguments: --local-rank",
        stall_s=60.0,  # torchrun loads PyTorch first
    ),
    Failure(
        name="crash-hangup",
        title="SignalException: Process got signal: 1",
        why=(
            "torchrun received a SIGHUP because the terminal or SSH session it was started from has closed. `nohup` "
            "doesn't help, because torchrun installs its own handler for that signal. Signal 15 comes from a scheduler "
            "or a `kill` command."
        ),
        tell="The message names the signal, and the ranks' logs end in the middle of a step without an error.",
        fix=(
            "Start torchrun in `tmux` or as a scheduler job. Or keep torchrun from handling SIGHUP: `nohup torchrun "
            "--signals-to-handle SIGTERM,SIGINT,SIGQUIT ... &`."
        ),
        messages=(
            "torch.distributed.elastic.multiprocessing.api.SignalException",
            "got signal: 1",
        ),
        behavior=(
            "training is killed when the terminal or the SSH connection is closed",
            "training stops by itself with nohup, after logging out or closing the laptop",
            "the job dies when I log out, close the laptop, VS Code or the SSH session; nohup; background",
            "received a SIGHUP, SIGINT or SIGTERM; the pod or job is deleted, preempted or canceled",
        ),
        quotes={
            "a run on the CPU": (
                "got signal: 15",
                "got signal: 2",
                "exit code 143",
                "exit code -15",
            ),
            "torch/distributed/elastic/agent/server/api.py": (
                "Received 1 death signal, shutting down workers",
                "Received 15 death signal",
                "Received Signals.SIGHUP death signal, shutting down workers",
                "Received Signals.SIGTERM death signal",
                "Received Signals.SIGINT death signal",
            ),
        },
        broken=hang_up,
        fixed=hang_up_without_a_handler,
        right=fourth_step,
        says="got signal: 1",
        stall_s=60.0,  # torchrun loads PyTorch first
    ),
    Failure(
        name="crash-rendezvous-closed",
        title="RendezvousClosedError, or a node joins too late",
        why=(
            "torchrun's agents find each other through a rendezvous ID. Once one node has finished or failed, it "
            "closes the rendezvous, so any node that restarts or arrives later can't join. Reusing an old job's ID has "
            "the same effect."
        ),
        tell="The real error comes before this message, in the log of the node that left first.",
        fix=(
            "Read the log of the node that failed first. Use a new ID for every job, such as "
            "`--rdzv-id=$SLURM_JOB_ID`. If nodes start more than ten minutes apart, raise the join timeout "
            "(`--rdzv-conf=join_timeout=1800`). If you run several jobs on one machine, start each with `--standalone` "
            "or `--rdzv-endpoint=localhost:0`."
        ),
        messages=("RendezvousClosedError",),
        behavior=(
            "some nodes finish and the last one fails in the rendezvous",
            "elastic: a node restarts or joins after the others have finished; max_restarts; the same rdzv_id",
        ),
        quotes={
            "a run on the CPU": ("RendezvousConnectionError",),
            "torch/distributed/elastic/rendezvous/api.py": (
                "RendezvousGracefulExitError",
                "RendezvousStateError",
                "The rendezvous is closed",
            ),
        },
        broken=join_a_finished_job,
        fixed=join_under_a_new_id,
        right=one_node,
        says="RendezvousClosedError",
        stall_s=30.0,  # far above the second that a rendezvous waits for more nodes
    ),
    Failure(
        name="save-two-writers",
        title="Two runs write to the same folder",
        why=(
            "torchrun was killed with SIGKILL, but its ranks kept running as orphans, and they're still writing to the "
            "folder that the next run uses."
        ),
        tell="`python -m fsdp_helpers doctor` lists orphaned ranks. In `ps -ef`, an orphan's parent is process 1.",
        fix=(
            "Ask Linux to kill each rank when its agent dies (`prctl`), and lock the folder, as `train` does. "
            "[Notebook 10](10_many_machines.ipynb) lists all the ways that a job can end."
        ),
        behavior=(
            "two runs write to the same folder; ranks of a killed torchrun are still training",
            "GPU memory stays in use after Ctrl-C or kill; zombie or orphan processes from the last run",
            "old processes keep training after torchrun has been killed",
        ),
        broken=leave_ranks_behind,
        fixed=end_ranks_with_their_agent,
        right=no_rank,
        stall_s=60.0,  # torchrun loads PyTorch first
    ),
    Failure(
        name="hang-extension-lock",
        title="Stuck at Using ~/.cache/torch_extensions as PyTorch extensions root",
        why=(
            "A CUDA extension is compiled the first time it's used, and a lock file keeps other processes out. A "
            "killed build leaves the lock file behind, and every later process waits for the file to go away. On a "
            "network disk, ranks on several nodes wait for one another."
        ),
        tell=(
            "`py-spy dump` shows `wait` in `file_baton.py`. The extension's folder contains a file called `lock` "
            "that's older than the job."
        ),
        fix=(
            "Run `rm -rf ~/.cache/torch_extensions`, and then build the extension on a single rank first. Or install a "
            "prebuilt version. Set `TORCH_EXTENSIONS_DIR` to a folder on a local disk."
        ),
        behavior=(
            "hangs while loading or compiling an extension: fused_adam, cpu_adam, deformable attention, ninja",
            "stuck at Loading extension module, after a killed or interrupted build",
        ),
        quotes={
            "torch/utils/cpp_extension.py": (
                "as PyTorch extensions root",
                "Loading extension module",
                "Detected CUDA files, patching ldflags",
                "Emitting ninja build file",
            ),
        },
        broken=wait_for_a_killed_build,
        fixed=remove_its_lock_first,
        right=one_extension,
        says=r"wait\(\), called from agents.py",
    ),
)
