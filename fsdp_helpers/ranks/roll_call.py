"""Finding the ranks that don't answer when a collective times out.

A collective that times out says so on every waiting rank, but doesn't name the missing one. So the waiting ranks call
the roll in the store where the group met. Each rank signs, and one that hasn't signed in time is stopped, stuck or
gone.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from fsdp_helpers.ranks.group import LONGEST_WAIT_S, gather_over_ranks, roll_call_s

POLL_S = 0.1
# Words in gloo's and NCCL's messages about such errors, which don't have a type of their own.
WAITED_IN_VAIN = ("gloo", "timed out", "connection closed", "collective operation timeout", "ncclremoteerror")


class SilentRanks(TimeoutError):
    """Some ranks neither joined a collective nor answered; the message has their numbers."""


def waited_in_vain(message: str) -> bool:
    """Return True if an error with this message came from a collective that some rank didn't join."""
    return any(words in message.lower() for words in WAITED_IN_VAIN)


@contextmanager
def silent_ranks_named(timeout_s: float | None) -> Iterator[None]:
    """Within the block, a collective that times out raises SilentRanks, which names the ranks that didn't join.

    Every rank of the group has to enter the block. A silent rank that was started by the same torchrun is killed at
    once, since torchrun itself would give a stopped process 30 seconds.
    """
    timeout_s = timeout_s or LONGEST_WAIT_S
    agent = os.environ.get("GROUP_RANK")  # of torchrun; `launch` ends its ranks itself
    processes = gather_over_ranks((agent, os.getpid())) if agent else []
    began_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not waited_in_vain(str(error)):
            raise
        if agent:  # an agent that has lost its rendezvous ends its ranks, but they should say why first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        silent = call_the_roll(dist.get_rank(), dist.get_world_size(), roll_call_s(timeout_s))
        if not silent:
            raise
        for rank in silent if agent else ():
            its_agent, pid = processes[rank]
            if its_agent == agent:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time_was_up = time.monotonic() - began_s >= timeout_s
        raise SilentRanks(_describe(silent, timeout_s if time_was_up else None)) from error


def call_the_roll(rank: int, world_size: int, wait_s: float) -> list[int]:
    """Return the ranks that didn't sign within `wait_s` seconds; [0] if rank 0's store doesn't answer."""
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


def list_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _describe(silent: list[int], timeout_s: float | None) -> str:
    """Describe the silent ranks; `timeout_s` is None if the connection broke before anyone could wait that long."""
    they_are, their = ("it's", "its") if len(silent) == 1 else ("they're", "their")
    check = f"check {their} last output and {their} machine"
    if timeout_s is None:
        return f"{list_ranks(silent)} stopped answering: {they_are} gone or cut off; {check}"
    return (
        f"{list_ranks(silent)} didn't answer within {timeout_s:g} s: {they_are} stopped, stuck, gone or cut off; {check}. "
        "If a step can take longer, set a larger --timeout"
    )
