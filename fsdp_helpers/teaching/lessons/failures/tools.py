"""Tools that find out where ranks are, each in a rank function that needs it."""

import faulthandler
import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

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
