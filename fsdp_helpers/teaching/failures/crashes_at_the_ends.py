"""It crashes at its start, where processes meet, or at its end, when one of them leaves early."""

import socket
import subprocess
import sys
import tempfile
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
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        raise RuntimeError(errors[0] if errors else f"no answer, and exit status {done.returncode}: {done.stderr}")
    return {"the worker's answer": float(done.stdout)}


def spawn_from_a_cell(rank: int, world_size: int) -> Numbers:
    return answer_of([sys.executable, "-c", CELL])  # as in a notebook, there is no file to import from


def spawn_from_a_module(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder, "worker.py")
        module.write_text(CELL)
        return answer_of([sys.executable, str(module)])


def answer() -> Numbers:
    return {"the worker's answer": 42.0}


CRASHES_AT_THE_ENDS = (
    Failure(
        name="crash-connection-closed",
        title="A healthy rank is the one that fails",
        why="Rank 1 had fewer batches, finished and left. Rank 0 then finds its connection closed, and its traceback points "
        "at an innocent all-reduce.",
        tell="The message is about a connection, not about your code. Look at the *other* ranks: which ended first, and with "
        "what exit status? `launch` calls the roll and names the missing rank.",
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
        why="A fixed port such as 29500 belongs to whoever comes first: a neighbor's run, or an orphan of your own.",
        tell="The error names the port. `ss -ltnp | grep PORT` shows who has it; `doctor` lists leftovers.",
        fix="Let the system choose: port 0, `torchrun --standalone`, or `--rdzv-endpoint=localhost:0`.",
        broken=meet_at_a_fixed_port,
        fixed=meet_at_a_free_port,
        right=one_store,
        says="(?i)address already in use",
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
