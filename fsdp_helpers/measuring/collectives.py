"""Record a rank's collectives: their kinds, sizes and times, and the bytes that the rank sends."""

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_helpers.planning.traffic import ring_sent_bytes
from fsdp_helpers.records import Collective, CollectiveCount

# Operator -> its name in torch.distributed. Some are c10d's operators, which torch.distributed calls; the others are
# functional ones, which DTensors call.
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
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# Operators in these namespaces that aren't collectives.
NO_COLLECTIVES = ("check_for_nan", "wait_tensor", "_wrap_tensor_autograd")
# Collectives whose tensors must have the same shapes and types on all ranks.
ALIKE = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")
# FSDP2's name for what it does with one unit; the root's has no name in parentheses.
UNIT_PHASE = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.+?)\))?")
SETTLE_S, BUSY_SETTLE_S = 0.005, 0.5


class CollectiveTrace(TorchDispatchMode):
    """A dispatch mode that records every collective in `events`, and waits for each one to finish.

    gloo completes a collective in a separate thread. If the last reference to a buffer is dropped there, the profiler,
    which follows only one thread, doesn't see the buffer being freed. Waiting makes byte counts exact and reproducible.
    On a GPU, NCCL's `wait()` only makes later kernels wait, so we synchronize before and after each collective, and at
    both ends of each `record_function` phase. Otherwise, we'd time only the launches. Because of the waits,
    communication never overlaps with computation under a trace.

    A collective is in `events` as soon as it begins; `tell` gets it then and once more when it has ended.
    """

    def __init__(self, tell: Callable[[Collective], None] = lambda seen: None) -> None:
        super().__init__()
        self.events: list[Collective] = []
        self._tell = tell
        self._units: list[str] = []  # one per phase in progress; "" if FSDP2 names no unit there

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor handles it first, with local tensors; its collectives then come here
        if func.namespace == "profiler":
            _let_gpu_catch_up()
            self._note_unit(func, args)
        if not is_collective(func):
            return func(*args, **(kwargs or {}))
        _let_gpu_catch_up()
        begun = as_collective(func, args, kwargs or {}, (time.perf_counter(), math.inf))
        begun = replace(begun, unit=next((unit for unit in reversed(self._units) if unit), ""))
        self.events.append(begun)
        self._tell(begun)
        result = func(*args, **(kwargs or {}))
        if not is_point_to_point(func):  # a send may be waiting for a receive that this rank hasn't issued yet
            _wait_for(result)
        _let_gpu_catch_up()
        self.events[-1] = replace(begun, end_s=time.perf_counter())
        self._tell(self.events[-1])
        if any(tensor.device.type == "cpu" for tensor in _tensors(args)):
            _settle()
        return result

    def _note_unit(self, func: torch._ops.OpOverload, args: tuple) -> None:
        if "_enter" in func._schema.name:
            found = UNIT_PHASE.match(args[0])
            self._units.append((found[1] or "root") if found else "")
        elif self._units:  # otherwise, the phase began before the trace
            self._units.pop()


@contextmanager
def trace_collectives() -> Iterator[list[Collective]]:
    """Within the block, record all of this rank's collectives in the yielded list."""
    with CollectiveTrace() as trace:
        yield trace.events


def count_collectives(events: list[Collective] | tuple[Collective, ...]) -> tuple[CollectiveCount, ...]:
    """Return the number of collectives of each kind, their full-tensor bytes and their sent bytes."""
    by_op = {op: [event for event in events if event.op == op] for op in dict.fromkeys(event.op for event in events)}
    return tuple(
        CollectiveCount(
            op=op,
            count=len(alike),
            bytes=sum(event.bytes for event in alike),
            sent_bytes=sum(event.sent_bytes for event in alike),
        )
        for op, alike in by_op.items()
    )


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Return True if an operator is a collective, whether from c10d or functional."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace in NAMESPACES and name not in NO_COLLECTIVES


def is_point_to_point(func: torch._ops.OpOverload) -> bool:
    """Return True if an operator sends to or receives from a single other rank."""
    return OP_NAMES.get(func._schema.name.partition("::")[2]) in ("send", "recv")


def as_collective(func: torch._ops.OpOverload, args: tuple, kwargs: dict, times_s: tuple[float, float]) -> Collective:
    """Return a record of one collective call, from this rank's point of view in the call's process group."""
    named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    group = _group_of(named)
    name = func._schema.name.split("::")[1]
    op = OP_NAMES.get(name, name)
    full_bytes = _full_bytes(op, named.values(), group.size())
    if op == "all_gather" and func.namespace != "c10d":
        # A functional all-gather returns the full tensor, but its argument is only this rank's shard.
        full_bytes *= group.size()
    is_root = named.get("root_rank") == group.rank()
    sent_bytes = ring_sent_bytes(op, full_bytes, group.size(), is_root=is_root)
    if op == "all_to_all":
        sent_bytes = _sent_to_others(named, group)
    alike = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in _tensors(args) if op in ALIKE]
    return Collective(
        op=op,
        bytes=full_bytes,
        sent_bytes=sent_bytes,
        start_s=times_s[0],
        end_s=times_s[1],
        shapes=", ".join(dict.fromkeys(alike)).replace("torch.", ""),
        group=(group.group_name, *dist.distributed_c10d._world.pg_group_ranks.get(group, ())),
    )


def _group_of(named: dict[str, object]) -> dist.ProcessGroup:
    """Return the process group of a call; functional collectives pass only the group's name."""
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])  # under hybrid sharding, it doesn't include all ranks
    group = named["group_name"]
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group


def _sent_to_others(named: dict, group: dist.ProcessGroup) -> int:
    """Return the bytes that this rank sends in an all-to-all; each other rank may get a different number of rows."""
    sizes = [tensor.nbytes for tensor in _tensors(named.get("input_tensors", named.get("input")))]
    rows = named.get("input_split_sizes")
    if rows and sum(rows):
        sizes = [sizes[0] * count // sum(rows) for count in rows]
    if len(sizes) == 1:  # one tensor, with the same number of rows for each rank
        return sizes[0] * (group.size() - 1) // group.size()
    return sum(sizes) - sizes[group.rank()]


def _full_bytes(op: str, arguments: Iterable[object], num_ranks: int) -> int:
    """Return the size of the full tensor, such as the output of an all-gather or the input to a reduce-scatter."""
    sizes = [sum(tensor.nbytes for tensor in _tensors(argument)) for argument in arguments]
    if op in ("gather", "scatter"):  # one rank has the full tensor, and every rank has a part of it
        return num_ranks * min(size for size in sizes if size)
    return max(sizes)


def _tensors(arg: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)]


def _settle() -> None:
    """Give gloo's thread time to drop its last references; on a busy machine, it may have to wait for a core."""
    end_s = time.perf_counter() + BUSY_SETTLE_S
    time.sleep(SETTLE_S)
    while _another_thread_runs() and time.perf_counter() < end_s:
        time.sleep(SETTLE_S)


def _another_thread_runs() -> bool:
    """Return True if another thread of this process is running or waiting for a core; always False except on Linux."""
    threads = "/proc/self/task"
    for thread in os.listdir(threads) if os.path.isdir(threads) else ():
        with suppress(OSError), open(f"{threads}/{thread}/stat", "rb", buffering=0) as stat:  # or it has ended
            state = stat.read().rpartition(b")")[2].split()[0]
            if state == b"R" and int(thread) != threading.get_native_id():
                return True
    return False


def _let_gpu_catch_up() -> None:
    """If this process uses a GPU, wait until the GPU has finished all launched work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _wait_for(result: object) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            if (work := dist.Work.unbox(leaf)) is not None:  # NCCL returns none if it runs on the current stream
                work.wait()
        elif isinstance(leaf, Tensor):
            # It's a functional collective's result. For c10d's tensors, there's nothing to wait for.
            torch.ops._c10d_functional.wait_tensor(leaf)
