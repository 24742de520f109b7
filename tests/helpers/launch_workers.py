"""Workers of tests of the launcher itself, which need nothing beside torch and the launcher.

A process that imports them has loaded in half the time what `workers_for_tests` would load.
"""

import ctypes
import gc
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_helpers import progress
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks import server
from fsdp_helpers.ranks.group import rank_device


def load_torch_alone():
    """Let this Python's fork server load no more ahead, which takes half the time; not in pytest's own process."""
    server.PRELOADED[1:] = ["torch"]


def return_rank(rank, world_size):
    return rank, world_size


OPEN_POOLS = []


def leave_a_thread_pool_open(rank, world_size):
    """As torch.compile does: its threads wait for work until Python ends."""
    OPEN_POOLS.append(ThreadPoolExecutor(1))
    return OPEN_POOLS[0].submit(return_rank, rank, world_size).result()


def describe_itself(rank, world_size):
    """Everything that a rank can say of where it finds itself."""
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return {
        "rank": (rank, world_size),
        "pid": os.getpid(),
        "tensor": torch.full((2,), float(rank)),
        "sum": total.item(),
        "variables": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
        "backend": dist.get_backend(),
        "num_threads": torch.get_num_threads(),
        "num_frozen": gc.get_freeze_count(),
    }


def stop_rank_1(rank, world_size, sharding):
    """A rank that is there and does nothing any more, in the group of a mesh, or of half a hybrid one."""
    from fsdp_helpers.sharding.strategies import make_mesh  # of no use to the other workers

    mesh = make_mesh(rank_device(), TrainConfig(strategy="fsdp", sharding=sharding))
    group = mesh.get_group(mesh.ndim - 1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier(group=group)
    dist.barrier()


def return_environment(rank, world_size):
    return dict(os.environ)


def all_reduce_rank(rank, world_size):
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value.item()


def all_reduce_on_device(rank, world_size):
    value = torch.ones(1, device=rank_device())
    dist.all_reduce(value)
    return value.item(), str(rank_device()), torch.cuda.current_device()


def count_new_buffers(rank, world_size, seed):
    """New buffers in each of ten rounds that allocate and free three large ones, with small tensors kept.

    What is on the heap before differs from seed to seed and from rank to rank.
    """
    draw = random.Random(10 * seed + rank).randrange
    kept, counts = [bytearray(draw(16, 2000)) for _ in range(draw(2000))][::2], []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        first, second = torch.ones(2**23), torch.ones(2**23)
        kept.append(torch.ones(1))
        del first
        third = torch.ones(2**23)
        kept.append(torch.ones(4))
        del second, third
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        counts.append(round(faults * resource.getpagesize() / 2**25))
    return counts


def print_lines(rank, world_size, count):
    for number in range(count):
        print(f"rank {rank}", end=" ")
        print(f"line {number}")
    print("to stderr", rank, file=sys.stderr)
    sys.stdout.buffer.write("bytes: ü\n".encode())
    sys.stdout.flush()
    subprocess.run(["sh", "-c", "echo by a process"], check=True)
    libc = ctypes.CDLL(None)
    libc.puts(b"by a C library")
    libc.fflush(None)
    print("no newline at the end", end="")


def report_progress(rank, world_size, steps):
    for step in range(1, steps + 1):
        progress.report(step, steps, "counting", f"step {step}")
        time.sleep(0.01)


def raise_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        raise ZeroDivisionError(f"on purpose, on rank {rank}")
    dist.barrier()  # the others wait for a rank that never comes


def raise_while_another_prints(rank, world_size):
    if rank == 0:
        raise ZeroDivisionError("on purpose")
    print_for_ever(rank, world_size)


def print_for_ever(rank, world_size):
    while True:
        print("again")


def hang_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        sleep_for_ever()
    dist.all_reduce(torch.ones(1))


def keep_others_waiting(rank, world_size, way, seconds):
    """Rank 0 lets the others wait in a collective, and computes, reports or prints meanwhile."""
    end_s = time.monotonic() + seconds
    while rank == 0 and time.monotonic() < end_s:
        if way == "compute":
            torch.ones(100, 100) @ torch.ones(100, 100)
            continue
        time.sleep(0.3)
        if way == "print":
            print("still here")
        else:
            progress.report(0, 1, "waiting")
    found = torch.ones(1)
    dist.all_reduce(found)
    return found.item()


def sleep_for_ever():
    while True:
        time.sleep(60)


def ignore_sigterm(rank, world_size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()


def kill_itself(rank, world_size, bad_rank):
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_with(rank, world_size, status):
    sys.exit(status)


def leave_at_once(rank, world_size, status):
    os._exit(status)


def return_unpicklable(rank, world_size):
    return threading.Lock()


def return_what_cannot_be_read(rank, world_size):
    return ReadsOnlyInRanks()


class ReadsOnlyInRanks:
    def __reduce__(self):
        return int, ("no number",)


def report_until_ended(rank, world_size, folder):
    """Write this rank's process id; report a step now and then, until there is a file that says stop."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    for step in range(10_000):
        progress.report(step, 10_000, "counting")
        if Path(folder, "stop").exists():
            return "stopped"
        time.sleep(0.1)


def return_args(rank, world_size, *args):
    return args


# ---------------------------------------------------------------- processes that a worker starts

SLEEPER = ["sleep", "600"]


def start_processes():
    """One process of each kind that could outlive its rank; their ids."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:  # a daemon: neither a child of the rank, nor of its session, nor started with its environment
        os.setsid()
        if (daemon := os.fork()) == 0:
            sleep_for_ever()
        os.write(write_end, str(daemon).encode())
        os._exit(0)
    in_background = subprocess.run(["sh", "-c", "sleep 600 >&2 & echo $!"], stdout=subprocess.PIPE, check=True)
    shell = ["sh", "-c", "sleep 600 & echo $!; wait"]  # its child is nobody else's until the shell has ended
    own = (
        {"env": {}} if server.adopts() else {}
    )  # without a server, processes are found by what their environment holds
    family = subprocess.Popen(shell, stdout=subprocess.PIPE, start_new_session=True)
    return [
        int(os.read(read_end, 20)),
        int(in_background.stdout),
        family.pid,
        int(family.stdout.readline()),
        subprocess.Popen(SLEEPER).pid,
        subprocess.Popen(SLEEPER, start_new_session=True, **own).pid,
        start_forked_child().pid,
    ]


def start_forked_child():
    child = multiprocessing.get_context("fork").Process(target=sleep_for_ever)
    child.start()
    return child


def leave_processes(rank, world_size, folder, end):
    """Start processes, write their ids and this rank's, and end as `end` says."""
    pids = [os.getpid(), *start_processes()]
    path = os.path.join(folder, f"pids-{rank}")
    with open(f"{path}.part", "w") as file:
        file.write(" ".join(map(str, pids)))
    os.rename(f"{path}.part", path)
    if end == "failure":
        raise ZeroDivisionError("on purpose")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end != "success":
        sleep_for_ever()
