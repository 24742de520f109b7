"""Crashes at the start, when the processes connect, and at the end, when one of them exits early."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_helpers.teaching.failures.entry import Failure, Numbers

# ---------------------------------------------------------------- one rank ends early


def end_early(rank: int, world_size: int) -> Numbers:
    num_batches = 3 if rank == 0 else 2  # as after an uneven split
    for _ in range(num_batches):
        total = torch.ones(1)
        dist.all_reduce(total)
    return {"ranks in the last step": total.item()}


def end_together(rank: int, world_size: int) -> Numbers:
    num_batches = torch.tensor(3 if rank == 0 else 2)
    dist.all_reduce(num_batches, op=dist.ReduceOp.MIN)
    for _ in range(num_batches):
        total = torch.ones(1)
        dist.all_reduce(total)
    return {"ranks in the last step": total.item()}


def both_ranks() -> Numbers:
    return {"ranks in the last step": 2.0}


# ---------------------------------------------------------------- a port that is taken


def meet_at_a_fixed_port(rank: int, world_size: int) -> Numbers:
    with socket.create_server(("127.0.0.1", 0)) as neighbor:  # someone else's run
        port = neighbor.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)
        return {"stores": float(store.port > 0)}


def meet_at_a_free_port(rank: int, world_size: int) -> Numbers:
    with socket.create_server(("127.0.0.1", 0)):
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        return {"stores": float(store.port > 0)}


def one_store() -> Numbers:
    return {"stores": 1.0}


# ---------------------------------------------------------------- a function from a notebook

CELL = """
import multiprocessing
def worker(): print(6 * 7)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=worker)
    child.start(); child.join()
"""


ERROR = r"^([\w.]*Error|\S+: error): .*?(?=\n\n|\nTraceback|\nE\d{4} |\Z)"  # down to torchrun's log, or a cause


def answer_of(command: list[str], **variables: str) -> Numbers:
    """Run a program and return the number it prints; if it prints nothing, raise RuntimeError with its error output."""
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if not done.stdout:
        error = re.search(ERROR, done.stderr, re.MULTILINE | re.DOTALL)
        said = " ".join(error[0].split()) if error else f"no answer, and exit status {done.returncode}: {done.stderr}"
        raise RuntimeError(said)
    return {"the worker's answer": float(done.stdout)}


def answer_of_script(text: str, *starter: str) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(text)
        return answer_of([sys.executable, *starter, str(script)], TMPDIR=folder)  # torchrun leaves its logs there


def spawn_from_a_cell(rank: int, world_size: int) -> Numbers:
    return answer_of([sys.executable, "-c", CELL])  # as in a notebook, there is no file to import from


def spawn_from_a_module(rank: int, world_size: int) -> Numbers:
    return answer_of_script(CELL)


def answer() -> Numbers:
    return {"the worker's answer": 42.0}


# ---------------------------------------------------------------- a script that starts itself again

GUARD = 'if __name__ == "__main__":\n'


def spawn_without_a_guard(rank: int, world_size: int) -> Numbers:
    return answer_of_script(CELL.replace(GUARD, "if True:\n"))


# ---------------------------------------------------------------- a script for torchrun, without torchrun

ASK_TORCHRUN = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print(42 * dist.get_world_size())
"""
FORGET = "import os\nfor name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): os.environ.pop(name, None)\n"


def start_with_python(rank: int, world_size: int) -> Numbers:
    return answer_of_script(FORGET + ASK_TORCHRUN)


def start_with_torchrun(rank: int, world_size: int) -> Numbers:
    return answer_of_script(ASK_TORCHRUN, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


# ---------------------------------------------------------------- an error before the group is up

SCRIPT = """
import torch
from torch.distributed.elastic.multiprocessing.errors import record
@record_or_not
def main():
    torch.ones(2) @ torch.ones(3)
main()
"""


def lines_of_traceback(script: str) -> Numbers:
    """Run a script under torchrun, and return how many times torchrun's report mentions a line of the script."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        torchrun += ["--log-dir", folder]
        done = subprocess.run([*torchrun, str(path)], capture_output=True, text=True, check=False)
    report = done.stderr.partition("Root Cause")[2]
    return {"lines of the script in torchrun's report": report.count("train.py")}


def run_without_record(rank: int, world_size: int) -> Numbers:
    return lines_of_traceback(SCRIPT.replace("@record_or_not", ""))


def run_with_record(rank: int, world_size: int) -> Numbers:
    return lines_of_traceback(SCRIPT.replace("@record_or_not", "@record"))


def the_line_that_failed() -> Numbers:
    return {"lines of the script in torchrun's report": 1}


# ---------------------------------------------------------------- no store at that address


def meet_where_no_one_is(rank: int, world_size: int) -> Numbers:
    with socket.create_server(("127.0.0.1", 0)) as ended:  # yesterday's job
        port = ended.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    return {"stores": float(store.port > 0)}


def meet_where_the_store_is(rank: int, world_size: int) -> Numbers:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    return {"stores": float(store.port > 0)}


CRASHES_AT_THE_ENDS = (
    Failure(
        name="crash-no-torchrun",
        title="environment variable RANK expected, but not set",
        why=(
            "`init_process_group` reads the rank, the world size and the address from environment variables that "
            "torchrun sets. If you start the script with `python train.py`, those variables aren't set. A script that "
            "falls back to rank 0 of 1 then trains alone, without an error."
        ),
        tell=(
            "`env | grep -E 'RANK|WORLD_SIZE|MASTER'` prints nothing. A collective called without `init_process_group` "
            "fails with *Default process group has not been initialized*."
        ),
        fix=(
            "Start the script with `torchrun --standalone --nproc-per-node 8 train.py`. Under Slurm, start one "
            "torchrun per node, as in [notebook 10](10_many_machines.ipynb)."
        ),
        messages=("environment variable RANK expected, but not set",),
        behavior=(
            "each process says that it is rank 0 of 1; the world size is 1",
            "SyncBatchNorm, DDP or FSDP is used on a single GPU, without a process group",
            "only one GPU is used although there are several",
            "the script runs without torchrun, or torchrun's variables are missing under Slurm",
            "the world size is 1, so FSDP switches to NO_SHARD",
            "python train.py instead of torchrun or accelerate launch; no RANK, LOCAL_RANK, WORLD_SIZE or MASTER_ADDR",
            "the processes don't know about each other: every one prints rank 0, world size 1, and trains alone",
            "a single process or a single GPU: FSDP, DDP, SyncBatchNorm or all_reduce is called without a group",
            "FSDP does not shard with one GPU; the sharding strategy changes to NO_SHARD",
            "a CPU or single-GPU run of a distributed script fails; how to run without torch.distributed",
        ),
        quotes={
            "a run on the CPU": (
                "Default process group has not been initialized",
                "Error initializing torch.distributed using env:// rendezvous",
                "environment variable WORLD_SIZE expected, but not set",
                "environment variable MASTER_ADDR expected, but not set",
                "environment variable MASTER_PORT expected, but not set",
                "KeyError: 'LOCAL_RANK'",
                "KeyError: 'RANK'",
                "KeyError: 'WORLD_SIZE'",
                "KeyError: 'MASTER_ADDR'",
                "KeyError: 'SLURM_PROCID'",
                "KeyError: 'LOCAL_WORLD_SIZE'",
                "please make sure to call init_process_group",
                "FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the world size is 1",
                "offload_to_cpu=True and NO_SHARD is not supported yet",
                "Invalid process group specified",
                "error: the following arguments are required: training_script",
            ),
            "torch/distributed/distributed_c10d.py": ("LOCAL_RANK is not in the environment",),
            "torch/distributed/device_mesh.py": ("DeviceMesh process groups not initialized",),
            "torch/distributed/fsdp/_state_dict_utils.py": (
                "can only be used when parameters are flatten and sharded",
            ),
            "transformers, accelerate": (
                "Using fsdp only works in distributed training",
                "Using FSDP is only possible in distributed training",
            ),
            "an older PyTorch": ("Default process group is not initialized",),
            "transformers": ("local_rank == -1",),
        },
        broken=start_with_python,
        fixed=start_with_torchrun,
        right=answer,
        says="environment variable RANK expected, but not set",
    ),
    Failure(
        name="crash-main-guard",
        title="An attempt has been made to start a new process before its bootstrapping phase has finished",
        why=(
            "A spawned process imports the script that started it, so all code at the script's top level runs again, "
            "including `mp.spawn` or a `DataLoader` with workers."
        ),
        tell="The traceback shows the script's own lines twice, below `multiprocessing/spawn.py`.",
        fix='Put everything that starts processes under `if __name__ == "__main__":`.',
        messages=(
            (
                "An attempt has been made to start a new process before the current process has finished its "
                "bootstrapping phase"
            ),
        ),
        behavior=(
            "the script runs again in each spawned process",
            (
                "mp.spawn or a DataLoader starts the whole script again; recursion: processes keep starting more "
                "processes; Windows"
            ),
        ),
        quotes={
            "a run on the CPU": (
                "freeze_support()",
                "if __name__ == '__main__':",
            ),
        },
        broken=spawn_without_a_guard,
        fixed=spawn_from_a_module,
        right=answer,
        says="An attempt has been made to start a new process",
    ),
    Failure(
        name="crash-connection-closed",
        title="The rank that raises the error is the healthy one",
        why=(
            "Rank 1 has fewer batches, so it finishes first and exits. Rank 0 then finds its connection closed, and "
            "its traceback points at an innocent all-reduce."
        ),
        tell=(
            "The message is about a connection, not about your code. Look at the *other* ranks: which one exited "
            "first, and with what exit status? `launch` calls the roll and names the missing rank."
        ),
        fix="Have all ranks agree on the number of steps before the loop. Here, all ranks use the smallest number.",
        messages=(
            "Connection closed by peer",
            "This is typically caused by a remote worker",
            "Connection reset by peer",
        ),
        behavior=(
            "a healthy rank fails, with a message about a connection",
            "one node or pod was preempted, rebooted or killed, and the rest fail with a network error",
            "a connection error in the middle of training, after some hours; the real error is on a different rank",
            "rank 0 exits or crashes first, and all other ranks complain about the store",
        ),
        quotes={
            "a run on the CPU": (
                "Broken pipe",
                "failed to recv, got 0 bytes",
                "Connection was likely closed. Did the remote server shutdown or crash?",
                "sendBytes failed on SocketImpl",
                "ConnectionResetError: [Errno 104] Connection reset by peer",
                "BrokenPipeError: [Errno 32] Broken pipe",
                "ConnectionRefusedError: [Errno 111] Connection refused",
            ),
            "torch's Exceptions": ("torch.distributed.DistBackendError",),
            "torch's TCPStore.cpp": (
                "Stop_waiting response is expected",
                "ECONNRESET",
            ),
            "torch's NCCLUtils.cpp": (
                (
                    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
                    "prematurely"
                ),
                "ncclRemoteError",
            ),
            "torch's ProcessGroupNCCL.cpp": (
                "This may indicate a possible application crash on rank 0 or a network set up issue",
                "NCCL communicator was aborted",
                "Failed to get timeout rank ID from TCPStore",
            ),
            "an older PyTorch": (
                "recvValue failed on SocketImpl",
                'Failed to check the "should dump" flag on TCPStore',
                "Interrupted system call",
            ),
            "NCCL": (
                "Connection closed by remote peer",
                "socketProgressOpt: Call to recv from",
                "failed : Connection reset by peer",
                "socketProgress: Connection closed by remote peer",
                "remote process exited or there was a network error",
                "NCCL error: remote process exited",
            ),
        },
        broken=end_early,
        fixed=end_together,
        right=both_ranks,
        says="rank 1 stopped answering",
        group_timeout_s=60.0,  # never reached: rank 1 is gone, and rank 0 finds out five seconds later
        stall_s=30.0,
    ),
    Failure(
        name="crash-port-in-use",
        title="The server socket has failed to listen: address already in use",
        why=(
            "A fixed port such as 29500 belongs to whichever process opens it first. That may be someone else's run, "
            "or a leftover process of yours."
        ),
        tell=(
            "The error names the port. `ss -ltnp | grep PORT` shows the process using it, and `doctor` lists leftovers."
        ),
        fix="Let the system choose a free port: use port 0, `torchrun --standalone`, or `--rdzv-endpoint=localhost:0`.",
        messages=(
            "The server socket has failed to listen on any local network address",
            "EADDRINUSE",
            "address already in use",
        ),
        behavior=(
            "a second job on the same machine doesn't start",
            "two tasks on a single node at the same time, each with its own GPUs: the default master port is taken",
            "port already in use; two training runs on one server; port 29500",
            "the port is still taken after a crash, by a leftover process",
            "two experiments, jobs or users on one node with the same master_port; the second one fails",
            "can't start again right after a crash or Ctrl-C: the address is still in use",
            "running several training jobs at the same time on different GPUs of one server",
            (
                "several torchrun jobs on one node share the default endpoint; when the first ends, the others die "
                "with Broken pipe"
            ),
        ),
        quotes={
            "a run on the CPU": (
                "EADDRINUSE, message: address already in use",
                "port: 29500, useIpv6",
                "code: -98, name: EADDRINUSE",
                "OSError: [Errno 98] Address already in use",
            ),
            "torch's socket.cpp": ("The server socket has failed to bind to",),
            "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py": ("has failed to shutdown the rendezvous",),
            "an older PyTorch": (
                "errno: 98 - Address already in use",
                "EADDRINUSE (address already in use)",
            ),
            "accelerate": (
                "Tried to launch distributed communication on port",
                "but another process is utilizing it",
            ),
        },
        broken=meet_at_a_fixed_port,
        fixed=meet_at_a_free_port,
        right=one_store,
        says="(?i)address already in use",
    ),
    Failure(
        name="crash-no-traceback",
        title="ChildFailedError without a traceback",
        why=(
            "torchrun's report always contains the rank's exit code, but it contains the traceback only if the rank "
            "saved one for torchrun. Your own error is further up in the output, among the lines of the rank that "
            "failed first, or in that rank's log file."
        ),
        tell=(
            "The report says `error_file: <N/A>`. Search upward in the output for the first `Traceback`. Look at the "
            "rank under *Root Cause (first observed failure)* and at its exit code: 1 means an exception, -6 an "
            "abort, -9 a kill (often because memory ran out), -11 a crash in C++, and -15 torchrun's own SIGTERM "
            "after a different rank failed."
        ),
        fix=(
            "Put `@record` (from `torch.distributed.elastic.multiprocessing.errors`) above `main()`. To keep each "
            "rank's output as well, use `torchrun --log-dir logs --tee 3`."
        ),
        messages=(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
            "error_file: <N/A>",
            "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        ),
        behavior=(
            "torchrun reports an exit code, but no traceback",
            "torch.distributed fails with exit code 1 and gives no reason",
            "ChildFailedError without a reason; where is the real error; only the torchrun summary is shown",
            "the log has only a list of ranks with exitcode 1 and traceback N/A; the first error is hidden",
            "it fails immediately and says nothing useful; main.py FAILED, train.py FAILED",
        ),
        quotes={
            "a run on the CPU": (
                "closing signal SIGTERM",
                "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0",
                "failed (exitcode: 1) local_rank: 0 (pid: 4242) of binary",
                "Root Cause (first observed failure)",
                "Sending process 4242 closing signal SIGTERM",
                "Signal 15 (SIGTERM) received by PID",
                "returned non-zero exit status 1",
                "exitcode  : -15",
                "exitcode  : 1 (pid",
                "<NO_OTHER_FAILURES>",
                "Signal 15 (SIGTERM)",
                "failed (exitcode: -15)",
                "terminated with the following error",
                "ProcessExitedException",
                "terminated with signal",
                "subprocess.CalledProcessError: Command",
            ),
            "torch/distributed/elastic/multiprocessing/errors/error_handler.py": ("no error file defined for parent",),
            "torch/distributed/launcher/api.py": ("raise ChildFailedError",),
            "accelerate": ("raise subprocess.CalledProcessError",),
        },
        broken=run_without_record,
        fixed=run_with_record,
        right=the_line_that_failed,
    ),
    Failure(
        name="hang-dead-address",
        title="The client socket has timed out while trying to connect",
        why=(
            "A rank looks for the others at `MASTER_ADDR` and `MASTER_PORT`. Maybe these variables are left over from "
            "a different job, rank 0 hasn't started or has failed, or the name resolves to a machine that doesn't "
            "answer. If the address is `localhost` on every node, each node waits for itself."
        ),
        tell=(
            "The message contains the address and the port. Check whether rank 0 is running at that address. `python "
            "-m fsdp_helpers doctor` finds stale variables."
        ),
        fix=(
            "Run `unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`. On one machine, use `torchrun --standalone`. On "
            "several machines, give them all the same `--rdzv-endpoint=HOST:PORT`."
        ),
        messages=("The client socket has timed out after 2000ms while trying to connect to",),
        behavior=(
            "hangs at the start, before any rank prints its first line",
            "stuck in init_process_group: some ranks never join",
            "waiting for clients; fewer clients than the world size have joined",
            "torchrun, init_process_group or the TCPStore times out while connecting to the master node",
            "the master address is wrong, or the master node has not started",
            "stuck at init_process_group, or hangs right at initializing distributed; NODE_RANK is set",
            "unable to connect to the master; connection timed out",
            "multi-node Slurm jobs hang at startup: each node waits for the others at localhost or 127.0.0.1",
            "the master host name can't be resolved: scontrol, hostname or DNS fails inside the container",
            "workers wait for the master; the master pod is not ready, or its service name doesn't resolve",
            "hangs with no output after torchrun or accelerate launch on two machines; main_process_ip, machine_rank",
            "init_process_group never returns; nothing is printed; the program waits forever at the beginning",
            "stale MASTER_ADDR, MASTER_PORT or WORLD_SIZE from an earlier job or a scheduler",
        ),
        quotes={
            "a run on the CPU": (
                "The IPv6 network addresses of",
                "cannot be retrieved (gai error: -2 - Name or service not known)",
                "failed to connect/validate to host",
                "RendezvousTimeoutError",
                "DistNetworkError",
                "DistStoreError",
                "Timed out after 61 seconds waiting for clients",
                "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
                (
                    "RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for "
                    "details"
                ),
                "gai error: -2",
                "Name or service not known",
                "The client socket has timed out after 60000ms while trying to connect to",
            ),
            "torch's socket.cpp": (
                "The hostname of the client socket cannot be retrieved",
                "The client socket has failed to connect to",
                "gai error: -3",
            ),
            "torch's TCPStore.cpp": (
                "The server socket on",
                "is not yet listening",
            ),
            "torch/distributed/elastic/rendezvous/utils.py": ("The hostname of the rendezvous endpoint",),
            "torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py": (
                "endpoint is absent in RendezvousParameters",
                "rank is absent in RendezvousParameters",
                "Port is absent in endpoint",
            ),
            "an older PyTorch": (
                "The client socket has timed out after 60s while trying to connect to",
                "failed to connect to TCPStore",
            ),
            "the C library": ("Temporary failure in name resolution",),
            "accelerate": ("but `MASTER_ADDR` env was not set",),
        },
        broken=meet_where_no_one_is,
        fixed=meet_where_the_store_is,
        right=one_store,
        says="The client socket has timed out",
        stall_s=30.0,
    ),
    Failure(
        name="crash-notebook-function",
        title="Can't get attribute 'worker' on module '__main__'",
        why=(
            "A spawned process imports the module that defines its function. A function from a notebook cell belongs "
            "to `__main__`, and in the new process, `__main__` is a different program."
        ),
        tell="The error comes from the child process, in `multiprocessing.spawn`, before any of your code runs.",
        fix="Put the function in a module. A `%%writefile` cell is enough.",
        messages=("Can't get attribute 'worker' on <module '__main__'",),
        behavior=(
            "a function from a notebook can't be spawned",
            (
                "multi-GPU training from a Jupyter notebook fails in spawn; a lambda, a lock or an open file can't be "
                "pickled"
            ),
            "num_workers above 0 fails with a pickle error on Windows or macOS",
            "notebook_launcher or mp.spawn in Jupyter, Colab or Kaggle fails to find or pickle the function",
            (
                "a lambda, a local function, a generator or a lock in the data set or collate_fn can't be pickled "
                "with spawn"
            ),
        ),
        quotes={
            "a run on the CPU": (
                "cannot pickle",
                "EOFError: Ran out of input",
                "can't pickle",
                "PicklingError",
                "TypeError: cannot pickle",
                "_pickle.PicklingError: Can't pickle",
                "cannot pickle 'generator' object",
                "cannot pickle '_thread.lock' object",
            ),
            "Python 3.11": (
                "Can't pickle local object",
                "AttributeError: Can't pickle local object",
            ),
            "Python 3.12": ("Can't get local object",),
            "accelerate, Lightning": ("is not compatible with an interactive environment",),
        },
        broken=spawn_from_a_cell,
        fixed=spawn_from_a_module,
        right=answer,
        says="Can't get attribute 'worker'",
    ),
)
