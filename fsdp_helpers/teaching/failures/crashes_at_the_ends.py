"""It crashes at the start, where processes meet, or at the end, when one of them exits early."""

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
    num_batches = 3 if rank == 0 else 2  # as an uneven split leaves it
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


def answer_of(command: list[str]) -> Numbers:
    """Run a program and return the number that it prints; RuntimeError with its own error if it prints none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        error = re.search(r"^[\w.]*Error: .*?(?=\n\n|\nTraceback|\Z)", done.stderr, re.MULTILINE | re.DOTALL)
        said = " ".join(error[0].split()) if error else f"no answer, and exit status {done.returncode}: {done.stderr}"
        raise RuntimeError(said)
    return {"the worker's answer": float(done.stdout)}


def answer_of_script(text: str, *starter: str) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(text)
        return answer_of([sys.executable, *starter, str(script)])


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
    """Run a script under torchrun, and count the lines of the script that torchrun's report names."""
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


# ---------------------------------------------------------------- nobody at that address


def meet_where_no_one_is(rank: int, world_size: int) -> Numbers:
    with socket.create_server(("127.0.0.1", 0)) as ended:  # the job of yesterday
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
        why="`init_process_group` takes rank, world size and address from variables that torchrun sets. If you start it with `python train.py`, there are none, and a script that doesn't check trains alone: each process is rank 0 of 1.",
        tell="`env | grep -E 'RANK|WORLD_SIZE|MASTER'` is empty. A collective without `init_process_group` says *Default "
        "process group has not been initialized*.",
        fix="`torchrun --standalone --nproc-per-node 8 train.py`; under Slurm, one torchrun per node, as in "
        "[10](10_many_machines.ipynb).",
        broken=start_with_python,
        fixed=start_with_torchrun,
        right=answer,
        says="environment variable RANK expected, but not set",
    ),
    Failure(
        name="crash-main-guard",
        title="An attempt has been made to start a new process before its bootstrapping phase has finished",
        why="A spawned process imports the script that started it. Lines at its top level run again there, including `mp.spawn` or a `DataLoader` with workers.",
        tell="The traceback shows the script's own lines twice, below `multiprocessing/spawn.py`.",
        fix='`if __name__ == "__main__":` in front of everything that starts processes.',
        broken=spawn_without_a_guard,
        fixed=spawn_from_a_module,
        right=answer,
        says="An attempt has been made to start a new process",
    ),
    Failure(
        name="crash-connection-closed",
        title="A healthy rank is the one that fails",
        why="Rank 1 had fewer batches, finished and exited. Rank 0 then finds its connection closed, and its traceback points at an innocent all-reduce.",
        tell="The message is about a connection, not about your code. Look at the *other* ranks: which one ended first, and with what exit status? `launch` calls the roll and names the missing rank.",
        fix="Agree on the number of steps before the loop; here all ranks take the smallest.",
        broken=end_early,
        fixed=end_together,
        right=both_ranks,
        says="rank 1 did not answer",
        group_timeout_s=60.0,  # never reached: rank 1 is gone, and five seconds later rank 0 has called the roll
        stall_s=30.0,
    ),
    Failure(
        name="crash-port-in-use",
        title="The server socket has failed to listen: address already in use",
        why="A fixed port such as 29500 belongs to whoever takes it first: someone else's run, or an orphan of your own.",
        tell="The error names the port. `ss -ltnp | grep PORT` shows who has it; `doctor` lists leftovers.",
        fix="Let the system choose: port 0, `torchrun --standalone`, or `--rdzv-endpoint=localhost:0`.",
        broken=meet_at_a_fixed_port,
        fixed=meet_at_a_free_port,
        right=one_store,
        says="(?i)address already in use",
    ),
    Failure(
        name="crash-no-traceback",
        title="ChildFailedError, and no traceback",
        why="torchrun's report has a rank's exit code, but its traceback only if the rank wrote one for torchrun. Your own error is higher up in the output, in the lines of the rank that failed first, or in its log file.",
        tell="The report says `error_file: <N/A>`. Search the output upward for the first `Traceback`; look at the rank under "
        "*Root Cause (first observed failure)*, and at its exit code: 1 is an exception, -6 an abort, -9 a kill, often for "
        "memory, -11 a crash in C++, -15 is torchrun's own SIGTERM after a different rank failed.",
        fix="Put `@record` (`torch.distributed.elastic.multiprocessing.errors`) above `main()`; `torchrun --log-dir logs --tee 3` "
        "keeps what each rank prints.",
        broken=run_without_record,
        fixed=run_with_record,
        right=the_line_that_failed,
    ),
    Failure(
        name="hang-dead-address",
        title="The client socket has timed out while trying to connect",
        why="A rank looks for the others at `MASTER_ADDR` and `MASTER_PORT`. The variables are left over from a different job, "
        "rank 0 hasn't started or has failed, or the name resolves to a machine that doesn't answer.",
        tell="The message has the address and the port: is a rank 0 there? `python -m fsdp_helpers doctor` finds stale variables.",
        fix="`unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`, and `torchrun --standalone` on one machine; on several, one "
        "`--rdzv-endpoint=HOST:PORT` for all.",
        broken=meet_where_no_one_is,
        fixed=meet_where_the_store_is,
        right=one_store,
        says="The client socket has timed out",
        stall_s=30.0,
    ),
    Failure(
        name="crash-notebook-function",
        title="Can't get attribute 'worker' on module '__main__'",
        why="A spawned process imports the module of its function. A function from a notebook cell belongs to `__main__`, "
        "which in the new process is a different program.",
        tell="The error comes from the child, from `multiprocessing.spawn`, before any of your lines runs.",
        fix="Put the function into a module; `%%writefile` in a cell is enough.",
        broken=spawn_from_a_cell,
        fixed=spawn_from_a_module,
        right=answer,
        says="Can't get attribute 'worker'",
    ),
)
