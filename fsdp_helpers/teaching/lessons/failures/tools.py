"""Tools that find out where ranks are, each in a rank function that needs it."""

import faulthandler
import json
import os
import socket
import subprocess
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_helpers.ranks.exchange import gather_over_ranks
from fsdp_helpers.teaching.lessons.failures.pieces import cpu_mesh, images, in_units, set_timeout, small_model


def part_ways(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
    """Reduce on rank 0 while the others gather."""
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        dist.all_gather([torch.empty(2) for _ in range(world_size)], torch.ones(2), group=group)


def write_stacks(rank: int, world_size: int, folder: str) -> None:
    """Hang; every second Python itself writes where every thread of this rank is."""
    with open(Path(folder, f"rank-{rank}.txt"), "w") as file:
        faulthandler.dump_traceback_later(1.0, repeat=True, file=file)
        part_ways(rank, world_size)


def dump_with_py_spy(rank: int, world_size: int) -> str:
    """Wait on rank 0; on rank 1, which is elsewhere meanwhile, let py-spy say where rank 0 is."""
    pids = gather_over_ranks(os.getpid())
    command = ["py-spy", "dump", "--pid", str(pids[0])]
    dump = ""
    while rank == 1 and "all_reduce" not in dump:
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    dist.all_reduce(torch.ones(3))
    return dump


def read_debug_server(rank: int, world_size: int) -> str:
    """Wait on rank 0; on rank 1, which is elsewhere meanwhile, read where all ranks are on the debug server's page.

    The server's parts meet in a store that torchrun has. `launch` has none, so rank 0 makes one.
    """
    from torch.distributed import debug  # needs tabulate, which PyTorch does not bring

    store = dist.TCPStore("localhost", 0, is_master=True) if rank == 0 else None
    ports = [store.port, free_port()] if store else [None, None]
    dist.broadcast_object_list(ports)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(ports[0]))
    debug.start_debug_server(ports[1])
    page = ""
    while rank == 1 and "all_reduce" not in page:
        with suppress(URLError):  # the server is still starting
            page = urlopen(f"http://localhost:{ports[1]}/stacks").read().decode()
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        debug.stop_debug_server()
    return page


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def check_each_collective(rank: int, world_size: int) -> None:
    """Part ways in a group that compares the ranks before each collective."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # what TORCH_DISTRIBUTED_DEBUG=DETAIL does from the start
    part_ways(rank, world_size, dist.new_group())


def read_flight_recorder(rank: int, world_size: int) -> tuple[str, list]:
    """Part ways, give up after two seconds, and read what PyTorch has recorded of the last collective."""
    impatient = dist.new_group()
    set_timeout(timedelta(seconds=2), impatient)
    with suppress(RuntimeError):
        part_ways(rank, world_size, impatient)
    last = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"][-1]
    dist.barrier()  # no rank leaves while the other still waits for it
    return last["profiling_name"], last["input_sizes"]


def count_gathers_of_a_forward(rank: int, world_size: int) -> tuple[int, int]:
    """Return the all-gathers of one forward, as PyTorch counts them: with the root alone sharded, and with units."""
    return gathers(fully_shard(small_model(), mesh=cpu_mesh())), gathers(in_units(small_model()))


@torch.no_grad()
def gathers(model: torch.nn.Module) -> int:
    with CommDebugMode() as counter:
        model(images())
    return counter.get_comm_counts()[torch.ops.c10d._allgather_base_]
