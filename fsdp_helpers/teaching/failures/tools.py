"""Rank functions that each use a different tool to show where the ranks are."""

import faulthandler
import json
import os
import subprocess
import time
from contextlib import suppress
from datetime import timedelta
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_helpers.ranks.group import gather_over_ranks
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, images, in_units, set_timeout, small_model
from fsdp_helpers.teaching.lessons.torchruns import free_port

POLL_S = 0.1
ANSWER_S = 30.0  # the server asks every rank for its stacks before it answers


def part_ways(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    """Call an all-reduce on rank 0 while the other ranks call an all-gather."""
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        dist.all_gather([torch.empty(2) for _ in range(world_size)], torch.ones(2), group=group)


def write_stacks(rank: int, world_size: int, folder: str) -> None:
    """Hang while Python writes the stacks of this rank's threads every second."""
    with open(Path(folder, f"rank-{rank}.txt"), "w") as file:
        faulthandler.dump_traceback_later(1.0, repeat=True, file=file)
        part_ways(rank, world_size)


def dump_with_py_spy(rank: int, world_size: int) -> str:
    """Make rank 0 wait for rank 1, which returns py-spy's dump of rank 0."""
    pids = gather_over_ranks(os.getpid())
    dump = ""
    while rank == 1 and "all_reduce" not in dump:  # rank 0 is on its way there
        dump = dump_process(pids[0])
    dist.all_reduce(torch.ones(3))
    return dump


def dump_process(pid: int) -> str:
    """Return py-spy's dump of a process; raise a RuntimeError with py-spy's own message if py-spy fails."""
    done = subprocess.run(["py-spy", "dump", "--pid", str(pid)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"py-spy can't read process {pid}: {' '.join(done.stderr.split())}")
    return done.stdout


def read_debug_server(rank: int, world_size: int) -> str:
    """Make rank 0 wait for rank 1, which returns the debug server's page with the stacks of all ranks.

    The server's processes find each other through a store: torchrun has one, and under `launch`, rank 0 creates one.
    PyTorch makes the server listen on all interfaces, where it answers anyone, so we stop it right away.
    """
    from torch.distributed import debug  # needs tabulate, which PyTorch doesn't install

    store = dist.TCPStore("localhost", 0, is_master=True) if rank == 0 else None
    ports = [store.port, free_port()] if store else [None, None]
    dist.broadcast_object_list(ports)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(ports[0]))
    debug.start_debug_server(ports[1])
    try:
        page = read_until(f"http://localhost:{ports[1]}/stacks", "all_reduce") if rank == 1 else ""
        dist.all_reduce(torch.ones(3))
    finally:
        if rank == 0:
            debug.stop_debug_server()
    return page


def read_until(address: str, word: str) -> str:
    """Return the page at `address` once it contains `word`, which shows that the server and the ranks are ready."""
    page = ""
    while word not in page:
        time.sleep(POLL_S)
        with suppress(OSError, HTTPException):  # no answer yet, or half of one
            page = urlopen(address, timeout=ANSWER_S).read().decode()
    return page


def check_each_collective(rank: int, world_size: int) -> None:
    """Call different collectives in a group that first checks that all ranks are about to call the same one."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does for all groups
    part_ways(rank, world_size, dist.new_group())


def read_flight_recorder(rank: int, world_size: int) -> tuple[str, list]:
    """Call different collectives, time out after two seconds, and return the last record's name and input sizes."""
    impatient = dist.new_group()
    set_timeout(timedelta(seconds=2), impatient)
    with suppress(RuntimeError):
        part_ways(rank, world_size, impatient)
    last = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"][-1]
    dist.barrier()  # no rank leaves while the other still waits for it
    return last["profiling_name"], last["input_sizes"]


def count_gathers_of_a_forward(rank: int, world_size: int) -> tuple[int, int]:
    """Return PyTorch's all-gather counts for a forward pass: with only the root sharded, and with a unit per layer."""
    return gathers(fully_shard(small_model(), mesh=cpu_mesh())), gathers(in_units(small_model()))


@torch.no_grad()
def gathers(model: torch.nn.Module) -> int:
    """Return the number of all-gathers in one forward pass."""
    with CommDebugMode() as counter:
        model(images())
    return counter.get_comm_counts()[torch.ops.c10d._allgather_base_]
