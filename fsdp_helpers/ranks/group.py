"""Inside one rank: join the group, choose a device and a share of the cores, and leave the group again.

A worker can't tell whether `launch` or torchrun started it.
"""

import ctypes
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fsdp_helpers.gpus import are_hidden, compute_repeatably

WAIT_IN_THE_OPEN = "TORCH_NCCL_BLOCKING_WAIT"
LONGEST_WAIT_S = 1800.0  # for the other ranks, if no timeout is given; it's torch's own default
ROLL_CALL_S = 5.0  # at most; a quarter of the timeout if that's shorter
JOIN_S = 300.0  # for all ranks to load PyTorch and join; a shorter timeout is meant for the steps only

set_timeout = getattr(dist, "set_timeout", c10d._set_pg_timeout)  # its name in older versions of torch

_device: torch.device | None = None  # this rank's, while it is in a group


def rank_device() -> torch.device:
    """Return this rank's device; outside a group, the first CUDA device or, if none is visible, the CPU."""
    if _device is not None:
        return _device
    return torch.device("cuda", 0) if not are_hidden() and torch.cuda.is_available() else torch.device("cpu")


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless `world_size` is a number of ranks."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it must be a whole number, 1 or more")


def check_seconds(**limits_s: float | None) -> None:
    """Raise ValueError, naming the limit, unless each limit is None or a number of seconds above 0."""
    for name, limit_s in limits_s.items():
        is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
        if limit_s is not None and not (is_number and 0 < limit_s < math.inf):
            raise ValueError(f"{name} is {limit_s!r}; it must be a number of seconds above 0")


def roll_call_s(timeout_s: float) -> float:
    """Return the part of a timeout that's reserved for the roll call; a collective may wait for the rest."""
    return min(ROLL_CALL_S, timeout_s / 4)


@contextmanager
def process_group(
    rank: int,
    world_size: int,
    *,
    device: str,
    init_method: str = "env://",
    timeout_s: float | None = None,
    launched: bool = False,
) -> Iterator[None]:
    """Join the group of all ranks for the duration of the block: gloo between CPUs; nccl, with one device per rank, on CUDA.

    The default `init_method` reads the rendezvous from the variables that torchrun sets. A collective gives up a little
    before `timeout_s` (half an hour if it's None); the remaining time is for `silent_ranks_named`. Joining doesn't give
    up before JOIN_S, because one rank may take much longer than the others to load PyTorch. Ranks that `launch` started
    (`launched`) exit right after the block, so gloo's connections are left to close with the process; closing them one
    by one would cost 10 ms each.
    """
    global _device
    if device == "cuda":
        compute_repeatably()
        if timeout_s is not None:
            wait_in_the_open()
        _device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(_device)
        group = {"backend": "cpu:gloo,cuda:nccl", "device_id": _device}
    else:
        keep_freed_memory()
        _device = torch.device("cpu")
        group = {"backend": "gloo"}
    timeout_s, failed = timeout_s or LONGEST_WAIT_S, True
    defaults = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    try:
        group["timeout"] = timedelta(seconds=max(JOIN_S, timeout_s - roll_call_s(timeout_s)))
        dist.init_process_group(init_method=init_method, rank=rank, world_size=world_size, **group)
        share_cores()  # together, so that no rank leaves while another one is still connecting to it
        limit_waiting(timeout_s - roll_call_s(timeout_s))
        yield
        failed = False
    finally:
        _device = None
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = defaults
        if dist.is_initialized() and not (launched and (failed or device == "cpu")):
            dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory instead of handing it back to the system after every step.

    Each step allocates the same large buffers again; fresh ones would have to be cleared page by page. The price is
    that a process's resident memory stays at its peak. The other half of the settings takes effect only when a process
    starts (`MALLOC_TUNABLES`): `launch` applies it, but torchrun doesn't.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_mxfast, m_trim_threshold, m_mmap_max = 1, -1, -4  # from malloc.h
        libc.mallopt(m_mxfast, 0)  # merge freed scraps with their neighbors at once, as if there were no tcache
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def wait_in_the_open() -> None:
    """Make NCCL raise an error in a rank whose wait times out.

    By default, NCCL's `wait()` returns at once, and a watchdog thread later aborts the process (SIGABRT), although it's
    a healthy one, and doesn't name the missing rank. With this setting, `wait()` waits and raises, so the roll call can
    run, and there's no watchdog. The price is that communication no longer overlaps with computation. DDP, which never
    calls `wait()`, would hang, hence `wait_for_buckets`.
    """
    os.environ.setdefault(WAIT_IN_THE_OPEN, "1")


def waits_in_the_open() -> bool:
    return os.environ.get(WAIT_IN_THE_OPEN, "0") not in ("", "0")


def limit_waiting(timeout_s: float) -> None:
    """Set the timeout for all of this rank's groups and for future ones, which would otherwise wait half an hour."""
    limit = timedelta(seconds=timeout_s)
    if c10d.default_pg_timeout != limit:
        for group in c10d._world.pg_map:
            set_timeout(limit, group)
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit


def share_cores() -> None:
    """Give this rank an equal share of its host's cores, divided among the ranks on that host only.

    By default every rank starts one thread per core, and ranks on a laptop compete for them. Two torchruns on one host
    don't know of each other, so we count host names instead of trusting LOCAL_WORLD_SIZE.
    """
    num_ranks_here = gather_over_ranks(socket.gethostname()).count(socket.gethostname())
    torch.set_num_threads(max(1, num_cores() // num_ranks_here))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` across all ranks, the same on every rank; `values` itself in a single process."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_ranks(value: object) -> list:
    """Return a list of all ranks' values, in rank order; every rank gets the same list."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
