"""A small rank function that notebook 10 shows, and then runs."""

import os
import signal

import torch
import torch.distributed as dist


def add_up_without(rank: int, world_size: int, stopped: int) -> float:
    """Add up ones over the ranks after stopping one of them, as a debugger or a hanging machine would."""
    total = torch.ones(1)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(total)
    return total.item()
