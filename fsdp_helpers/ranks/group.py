"""Inside one rank: join the group, choose a device and a share of the cores, name missing ranks, and leave the group.

A worker can't tell whether `launch` or torchrun started it.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fsdp_helpers.gpus import are_hidden, compute_repeatably
from fsdp_helpers.ranks.errors import list_ranks

# By default, NCCL's `wait()` doesn't wait, and a watchdog later aborts a healthy process (SIGABRT) without naming the
# missing rank. With this setting, `wait()` waits and raises, so the roll call can run, but communication no longer
# overlaps with computation. See `nccl_can_raise` for where it works.
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LONGEST_WAIT_S = 1800.0  # for the other ranks, if no timeout is given; torch's own default
ROLL_CALL_S = 5.0  # at most; a quarter of the timeout if that's shorter
JOIN_S = 300.0  # at least, for all ranks to load PyTorch and join; a shorter timeout applies only to the steps
POLL_S = 0.1
# What gloo's and NCCL's messages say if a rank didn't join a collective; such errors don't have their own type.
# An argument that gloo refuses names it, too, but only its transport has sent something.
BLAME = ("gloo/transport", "timed out", "connection closed", "collective operation timeout", "ncclremoteerror")

set_timeout = getattr(dist, "set_timeout", c10d._set_pg_timeout)  # its name in older versions of torch


def rank_device() -> torch.device:
    """Return this rank's device: the GPU numbered by its local rank, or the CPU if there's no GPU or all are hidden."""
    if are_hidden() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def roll_call_s(timeout_s: float) -> float:
    """Return the part of a timeout that's reserved for the roll call; a collective may wait for the remaining time."""
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
    """Join the group of all ranks until the block ends: gloo on the CPU, or nccl with one device per rank on CUDA.

    The default `init_method` reads the rendezvous from the variables that torchrun sets. A collective gives up a little
    before `timeout_s` (half an hour if it's None); the remaining time is for `silent_ranks_named`. `launched` ranks exit
    right after the block, so gloo's connections close with the process; closing them one by one would cost 10 ms each.
    """
    if device == "cuda":
        compute_repeatably()
        if timeout_s is not None and nccl_can_raise():
            os.environ.setdefault(BLOCKING_WAIT, "1")
        torch.cuda.set_device(rank_device())
        group = {"backend": "cpu:gloo,cuda:nccl", "device_id": rank_device()}
    else:
        keep_freed_memory()
        group = {"backend": "gloo"}
    timeout_s, failed = timeout_s or LONGEST_WAIT_S, True
    try:
        group["timeout"] = timedelta(seconds=max(JOIN_S, timeout_s - roll_call_s(timeout_s)))
        dist.init_process_group(init_method=init_method, rank=rank, world_size=world_size, **group)
        share_cores()  # together, so that no rank leaves while another one is still connecting to it
        limit_waiting(timeout_s - roll_call_s(timeout_s))
        yield
        failed = False
    finally:
        if dist.is_initialized() and not (launched and (failed or device == "cpu")):
            dist.destroy_process_group()


def nccl_can_raise() -> bool:
    """Return True if NCCL's synchronous collectives can wait and raise: in nccl2, torch's default since 2.15.

    The implementation before it returns nothing to wait for, and BLOCKING_WAIT would only turn off its watchdog, so the
    other ranks would hang forever. There, the watchdog aborts them after the timeout.
    """
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    return release >= (2, 15) and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system after every step.

    Each step allocates the same large buffers again, and fresh ones would have to be cleared page by page. The price is
    that a process's memory stays at its peak. Half of the settings take effect only when a process starts
    (`MALLOC_TUNABLES`), so not under torchrun.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_mxfast, m_trim_threshold, m_mmap_max = 1, -1, -4  # from malloc.h
        libc.mallopt(m_mxfast, 0)  # merge freed scraps with their neighbors at once, as if there were no tcache
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def limit_waiting(timeout_s: float) -> None:
    """Set the timeout for all of this rank's current and future groups. By default, a new group gets half an hour."""
    limit = timedelta(seconds=timeout_s)
    if c10d.default_pg_timeout != limit:
        for group in c10d._world.pg_map:
            set_timeout(limit, group)
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit


def share_cores() -> None:
    """Give this rank an equal share of its host's cores, divided among the ranks on that host only.

    By default, every rank starts one thread per core, and ranks on a laptop compete for them. Two torchruns on one host
    don't know about each other, so we count host names instead of trusting LOCAL_WORLD_SIZE.
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


# ---------------------------------------------------------------- the roll call
#
# A collective that times out raises on every waiting rank, but doesn't name the missing one. So the waiting ranks take
# a roll call in the store where the group met. Each rank signs in; one that doesn't do so is stopped, stuck, or gone.


def blames_another_rank(message: str) -> bool:
    """Return True if an error with this message came from a collective that some rank didn't join."""
    return any(words in message.lower() for words in BLAME)


@contextmanager
def silent_ranks_named(timeout_s: float | None) -> Iterator[None]:
    """Within the block, a collective that times out raises a TimeoutError that names the ranks that didn't answer.

    Every rank of the group has to enter the block. Under torchrun, a rank kills the silent ones on its own machine.
    """
    timeout_s = timeout_s or LONGEST_WAIT_S
    agent = os.environ.get("GROUP_RANK")  # the number of this rank's torchrun; `launch` ends its own ranks
    processes = gather_over_ranks((agent, os.getpid())) if agent else []
    began_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not blames_another_rank(str(error)):
            raise
        if agent:  # a torchrun that has lost its rendezvous ends its ranks, but they should report why first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        silent = call_the_roll(dist.get_rank(), dist.get_world_size(), roll_call_s(timeout_s))
        if not silent:
            raise
        # torchrun would wait 30 s for a stopped rank to end.
        for pid in [pid for rank, (its_agent, pid) in enumerate(processes) if rank in silent and its_agent == agent]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said = "stopped answering: gone or cut off; check the last output and the machine"
        if time.monotonic() - began_s >= timeout_s:  # otherwise, the connection broke earlier
            said = (
                f"didn't answer within {timeout_s:g} s: stopped, stuck, gone or cut off; check the last output and the "
                "machine. If a step can take longer, set a larger --timeout"
            )
        raise TimeoutError(f"{list_ranks(silent)} {said}") from error


def call_the_roll(rank: int, world_size: int, wait_s: float) -> list[int]:
    """Return the ranks that didn't sign in within `wait_s` seconds; [0] if rank 0's store doesn't answer."""
    signed: set[int] = set()

    def collect() -> None:
        store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # the store may end with the rank that holds it
            store.set(f"roll-call/{rank}", "here")
            while len(signed) < world_size and time.monotonic() < until_s:
                signed.update(other for other in range(world_size) if store.check([f"roll-call/{other}"]))
                time.sleep(POLL_S)

    until_s = time.monotonic() + wait_s
    caller = threading.Thread(target=collect, daemon=True)  # because a store in a stopped process never answers
    caller.start()
    caller.join(wait_s + 2 * POLL_S)
    return sorted(set(range(world_size)) - signed) if signed else [0]
