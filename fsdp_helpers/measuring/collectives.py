"""Every collective of a rank: which, how many bytes, when."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_helpers.records import Collective, CollectiveCount

# c10d's operators, by the names that torch.distributed gives them.
OP_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
}
SETTLE_S = 0.005


class CollectiveTrace(TorchDispatchMode):
    """While active, notes every collective in `events`, and lets each one finish before the next operation.

    gloo completes a collective in a thread of its own. If the last reference to a buffer dies there, the profiler,
    which follows one thread, never hears that the buffer was freed. Waiting makes byte counts exact and
    repeatable; it also means that times under a trace show no overlap of communication with computation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start_s = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            _wait_for(result)
            op = OP_NAMES.get(func._schema.name.split("::")[1], func._schema.name)
            event = Collective(op=op, bytes=_full_bytes(args), start_s=start_s, end_s=time.perf_counter())
            self.events.append(event)
            if any(tensor.device.type == "cpu" for tensor in _tensors(args)):
                time.sleep(SETTLE_S)
        return result


@contextmanager
def trace_collectives() -> Iterator[list[Collective]]:
    """Note every collective that this rank takes part in within the block, in the yielded list."""
    with CollectiveTrace() as trace:
        yield trace.events


def count_collectives(events: list[Collective] | tuple[Collective, ...]) -> tuple[CollectiveCount, ...]:
    """How many of each kind, and the sum of their full-tensor bytes, in order of first appearance."""
    ops = dict.fromkeys(event.op for event in events)
    groups = {op: [event.bytes for event in events if event.op == op] for op in ops}
    return tuple(CollectiveCount(op=op, count=len(sizes), bytes=sum(sizes)) for op, sizes in groups.items())


def _full_bytes(args: tuple) -> int:
    """The size of the full tensor: what an all-gather puts out, what a reduce-scatter takes in."""
    return max((sum(tensor.nbytes for tensor in _tensors(arg)) for arg in args), default=0)


def _tensors(arg: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]


def _wait_for(result: object) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
