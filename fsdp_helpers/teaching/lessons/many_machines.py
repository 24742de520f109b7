"""A rank function for notebook 10: a suspended rank."""

import os
import signal

import torch
import torch.distributed as dist


def add_up_without(rank: int, world_size: int, stopped: int) -> float:
    """Suspend one rank, as a debugger or a frozen machine would, then all-reduce a 1 from every rank."""
    total = torch.ones(1)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()
