"""Inside one rank: join the group, take a device and a share of the cores, leave the group again.

A worker that runs here does not care who started it: `launch` or torchrun.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_device: torch.device | None = None  # this rank's, while it is in a group


def choose_device(device: str, ranks_on_this_machine: int) -> str:
    """Turn "auto", "cpu" or "cuda" into "cpu" or "cuda"; "auto" is CUDA where every rank gets a device of its own.

    Raises ValueError for any other word, and for more ranks than CUDA devices.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}; choose one of auto, cpu, cuda")
    num_devices = torch.cuda.device_count()
    if device == "cuda" and ranks_on_this_machine > num_devices:
        raise ValueError(
            f"{ranks_on_this_machine} ranks need {ranks_on_this_machine} CUDA devices, this machine has {num_devices}; "
            "use device 'cpu', or fewer ranks"
        )
    if device == "auto":
        return "cuda" if 1 <= ranks_on_this_machine <= num_devices else "cpu"
    return device


def rank_device() -> torch.device:
    """The device of this rank; outside a group, the first CUDA device or the CPU."""
    if _device is not None:
        return _device
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def process_group(rank: int, world_size: int, *, device: str, init_method: str = "env://") -> Iterator[None]:
    """Join the group of all ranks for the length of the block: gloo between CPUs; nccl, one device a rank, on CUDA.

    The default `init_method` reads the meeting point from the variables that torchrun sets.
    """
    global _device
    if device == "cuda":
        _device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(_device)
        group = {"backend": "cpu:gloo,cuda:nccl", "device_id": _device}
    else:
        _device = torch.device("cpu")
        group = {"backend": "gloo"}
    keep_freed_memory()
    try:
        dist.init_process_group(init_method=init_method, rank=rank, world_size=world_size, **group)
        share_cores()
        yield
    finally:
        _device = None
        if dist.is_initialized():
            dist.destroy_process_group()


def share_cores() -> None:
    """Give this rank an equal share of its machine's cores.

    Left alone, every rank starts one thread a core, and the ranks of a laptop fight for them.
    """
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    torch.set_num_threads(max(1, _num_cores() // hosts.count(socket.gethostname())))


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory instead of handing it back to the system after every step.

    Each step allocates the same large buffers again; when they come fresh from the system, it has to clear
    them page by page first. The price is that a process's resident memory stays at its highest. The other half
    of this, `launch.MALLOC_TUNABLES`, glibc reads only when a process starts: `launch` sets it, torchrun does not.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def started_by_torchrun() -> bool:
    """True in a process that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
