"""It crashes at the start, when the processes connect, or at the end, when one of them exits early."""

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


def answer_of(command: list[str], **variables: str) -> Numbers:
    """Run a program and return the number that it prints; raise a RuntimeError with its error if it prints nothing."""
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if not done.stdout:
        error = re.search(r"^[\w.]*Error: .*?(?=\n\n|\nTraceback|\Z)", done.stderr, re.MULTILINE | re.DOTALL)
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
    """Run a script under torchrun, and return how many times torchrun's report mentions a line of it."""
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
        broken=start_with_python,
        fixed=start_with_torchrun,
        right=answer,
        says="environment variable RANK expected, but not set",
    ),
    Failure(
        name="crash-main-guard",
        broken=spawn_without_a_guard,
        fixed=spawn_from_a_module,
        right=answer,
        says="An attempt has been made to start a new process",
    ),
    Failure(
        name="crash-connection-closed",
        broken=end_early,
        fixed=end_together,
        right=both_ranks,
        says="rank 1 stopped answering",
        group_timeout_s=60.0,  # never reached: rank 1 is gone, and rank 0 finds out five seconds later
        stall_s=30.0,
    ),
    Failure(
        name="crash-port-in-use",
        broken=meet_at_a_fixed_port,
        fixed=meet_at_a_free_port,
        right=one_store,
        says="(?i)address already in use",
    ),
    Failure(
        name="crash-no-traceback",
        broken=run_without_record,
        fixed=run_with_record,
        right=the_line_that_failed,
    ),
    Failure(
        name="hang-dead-address",
        broken=meet_where_no_one_is,
        fixed=meet_where_the_store_is,
        right=one_store,
        says="The client socket has timed out",
        stall_s=30.0,
    ),
    Failure(
        name="crash-notebook-function",
        broken=spawn_from_a_cell,
        fixed=spawn_from_a_module,
        right=answer,
        says="Can't get attribute 'worker'",
    ),
)
