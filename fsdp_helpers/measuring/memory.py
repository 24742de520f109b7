"""Measure a rank's memory: the state in its live tensors, and a curve of everything it allocates."""

import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _KinetoEvent, _ProfilerResult
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.profiler._utils import traverse_dfs

from fsdp_helpers.measuring.collectives import CollectiveTrace
from fsdp_helpers.records import Collective, MemoryCurve, Phase, StateBytes, StepTrace, later

STEP_PHASES = ("forward", "backward", "step")
OPTIMIZER_STEP = "Optimizer.step#"  # how PyTorch names the phase of every optimizer.step()
DATA_PHASE = "data"
_CLOCK_MARK = "fsdp_helpers clock"


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Return the bytes of this rank's parameters, gradients and optimizer state, without padding.

    If a tensor is sharded, only this rank's shard counts. Adam's step counters, 4 bytes per tensor, are left out.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    ]
    return StateBytes(
        parameter_bytes=_local_bytes(parameters),
        gradient_bytes=_local_bytes(gradients),
        optimizer_bytes=_local_bytes(moments),
    )


def _local_bytes(tensors: list[Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


class MemoryTrace:
    """A trace of every allocation on a device, every named phase and every collective between start() and stop().

    Start it before you create the model: only memory allocated after start() counts. With `held`, tensors that exist
    already count, too. On CUDA, we count the bytes that were requested, not the blocks that were handed out. A phase or
    a collective ends when the GPU is done, not when the work has been launched, so times under a trace don't show any
    overlap. `tell` gets each collective as it begins and as it ends.
    """

    def __init__(
        self, device: torch.device, *, held: bool = False, tell: Callable[[Collective], None] = lambda seen: None
    ) -> None:
        self._device, self._held = device, held
        self._earlier: list[tuple[weakref.ref, list[dict]]] = []  # what exists at start()
        self._points: list[tuple[float, int]] = []  # (time in s, bytes allocated from then on)
        self._phases: list[Phase] = []
        self._collectives = CollectiveTrace(tell)
        self._reserved_bytes: int | None = None  # the most memory that CUDA's allocator reserved

    def start(self) -> None:
        """Begin to record. Raises RuntimeError if a profiler is running: a process can have only one."""
        if torch.autograd._profiler_enabled():
            raise RuntimeError("this process has a profiler already, or a trace of its memory, and can have only one")
        gc.collect()  # otherwise, garbage would count as held, or be freed within the trace
        if self._held:
            self._earlier = list(map(_watch, _live_storages(self._device)))
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise, the profiler's library prints to standard error
        self._stack = ExitStack()
        with warnings.catch_warnings():
            # torch 2.11 warns about a profiler's cycles even if there's only one
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profile = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        self._stack.enter_context(self._collectives)
        self._marks_s = []
        for _ in range(5):
            self._marks_s.append(time.perf_counter())
            with record_function(_CLOCK_MARK):
                pass
        if self._device.type == "cuda":
            start_history(self._device)

    def stop(self) -> None:
        on_cuda = self._device.type == "cuda"
        noted = stop_history(self._device) if on_cuda else []
        self._reserved_bytes = torch.cuda.max_memory_reserved(self._device) if on_cuda else None
        self._stack.close()
        result = self._profile.profiler.kineto_results
        events, began_ns = result.events(), result.trace_start_ns()
        self._phases = _read_phases(events, began_ns)
        marks_s = [phase.start_s for phase in self._phases if phase.name == _CLOCK_MARK]
        # A mark begins a little after we note its time. The least delayed mark gives the offset between the clocks.
        offset_s = max(noted_s - mark_s for noted_s, mark_s in zip(self._marks_s, marks_s, strict=True))
        self._phases = [later(phase, offset_s) for phase in self._phases]
        if on_cuda:  # both the allocator and the profiler use Unix time
            offset_s -= began_ns / 1e9
        noted = noted if on_cuda else list(_cpu_history(result))
        for entry in noted:
            entry["time_us"] += 1e6 * offset_s
        noted += [entry for _, entries in self._earlier for entry in entries]
        self._points = requested_points(sorted(noted, key=lambda entry: entry["time_us"]))

    def last(self, name: str = "train step", uncounted_bytes: int = 0) -> StepTrace:
        """Return the last phase called `name`: times count from its start, and its curve leaves out `uncounted_bytes`.

        Raises ValueError if there's no phase with that name.
        """
        found = [phase for phase in self._phases if phase.name == name]
        if not found:
            raise ValueError(f"the trace has no {name!r}; mark it with torch.profiler.record_function({name!r})")
        return self._between(found[-1].start_s, found[-1].end_s, uncounted_bytes)

    def last_step(self) -> StepTrace:
        """Return the last step: from the end of the next-to-last `optimizer.step()` to the end of the last one.

        PyTorch itself marks each `optimizer.step()`. Images allocated in a phase called "data" are subtracted from the
        curve. Raises ValueError if there are fewer than two steps: the first one creates the optimizer state, so it
        isn't representative.
        """
        ends_s = [phase.end_s for phase in self._phases if phase.name.startswith(OPTIMIZER_STEP)]
        if len(ends_s) < 2:
            raise ValueError(f"the trace needs 2 or more optimizer steps, and has {len(ends_s)}")
        return self._between(ends_s[-2], ends_s[-1], self._data_bytes())

    def _data_bytes(self) -> int:
        ends_s = [phase.end_s for phase in self._phases if phase.name == DATA_PHASE]
        return next((size for time_s, size in reversed(self._points) if ends_s and time_s <= ends_s[-1]), 0)

    def whole(self) -> StepTrace:
        """Return the full trace, from start() to stop()."""
        return self._between(self._marks_s[0], float("inf"), 0)

    def between_marks(self, name: str) -> list[tuple[int, int]]:
        """Return two numbers per phase called `name`: bytes allocated at its start, and the peak until the next phase.

        The last phase's interval ends with the trace. To set a mark, use an empty `record_function(name)`.
        """
        starts = [phase.start_s for phase in self._phases if phase.name == name]
        found = []
        for start_s, end_s in zip(starts, [*starts[1:], float("inf")], strict=True):
            before = [size for time_s, size in self._points if time_s < start_s]
            at_start = before[-1] if before else 0
            found.append((at_start, max([at_start, *(s for t, s in self._points if start_s <= t < end_s)])))
        return found

    def _between(self, start_s: float, end_s: float, uncounted_bytes: int) -> StepTrace:
        before = [size for time_s, size in self._points if time_s < start_s]
        within = [(time_s, size) for time_s, size in self._points if start_s <= time_s <= end_s]
        points = [(start_s, before[-1] if before else 0), *within]
        phases = [phase for phase in self._phases if start_s <= phase.start_s <= end_s]
        trace = StepTrace(
            reserved_bytes=self._reserved_bytes,
            curve=MemoryCurve(
                times_s=tuple(time_s for time_s, _ in points),
                allocated_bytes=tuple(size - uncounted_bytes for _, size in points),
                phases=tuple(phase for phase in phases if phase.name in STEP_PHASES),
            ),
            collectives=tuple(seen for seen in self._collectives.events if start_s <= seen.start_s <= end_s),
            steps_s=tuple(phase.end_s for phase in phases if phase.name.startswith(OPTIMIZER_STEP)),
        )
        return later(trace, -start_s)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, make torch compute in one thread. On a CPU, bf16 products need scratch memory per thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def trace_memory(device: torch.device | str = "cpu") -> Iterator[MemoryTrace]:
    """Trace memory, phases and collectives within the block; read the results from the yielded trace afterward.

    with trace_memory(rank_device()) as trace:
        model = fully_shard(MyModel())
        for batch in batches:
            with record_function("train step"):
                ...
    trace.last("train step").curve.peak_bytes
    """
    trace = MemoryTrace(torch.device(device))
    trace.start()
    try:
        yield trace
    finally:
        trace.stop()


def _read_phases(events: list[_KinetoEvent], began_ns: int) -> list[Phase]:
    """Return the phases named with `record_function`, in order, with times from the start of the trace."""
    named = [event for event in events if event.is_user_annotation()]
    return [
        Phase(name=event.name(), start_s=(event.start_ns() - began_ns) / 1e9, end_s=(event.end_ns() - began_ns) / 1e9)
        for event in sorted(named, key=lambda event: event.start_ns())
    ]


def _cpu_history(result: _ProfilerResult) -> Iterator[dict]:
    """Yield allocations and frees on the CPU, in the form of CUDA's history, with times from the start of the trace.

    A free may be one of memory that an earlier trace has seen, perhaps at an address that has changed hands since.
    """
    for event in traverse_dfs(result.experimental_event_tree()):
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            size, time_us = event.extra_fields.alloc_size, (event.start_time_ns - result.trace_start_ns()) / 1e3
            action = "alloc" if size > 0 else "free_requested"
            yield {"action": action, "addr": event.extra_fields.ptr, "size": abs(size), "time_us": time_us}


def _live_storages(device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors on `device` that Python knows (a DTensor's shard is one), and of their gradients."""
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [
        tensor.untyped_storage() for tensor in tensors if tensor.device == device and tensor.layout == torch.strided
    ]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _watch(storage: torch.UntypedStorage) -> tuple[weakref.ref, list[dict]]:
    """Return a list that has a storage's allocation and will have its free, for as long as the reference is kept."""
    noted = [{"action": "alloc", "addr": ("earlier", storage.data_ptr()), "size": storage.nbytes(), "time_us": 0.0}]

    def note_free(_: weakref.ref) -> None:
        noted.append(noted[0] | {"action": "free_requested", "time_us": 1e6 * time.perf_counter()})

    return weakref.ref(storage, note_free), noted


# ---------------------------------------------------------------- on a GPU: the history of CUDA's caching allocator

# The allocator rounds each request up to a multiple of 512 bytes, and hands out an entire block if no more than 1 MiB
# of it would be left over. It counts those blocks as "allocated": for ShallowNet and Adam, 6.7% more than the tensors
# take. Its history also has the requests themselves, which the formulas predict: the same bytes as on the CPU.


def start_history(device: torch.device) -> None:
    """Make the allocator record every allocation and free from now on."""
    take_work_spaces(device)
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)  # cheap, without stacks


def stop_history(device: torch.device) -> list[dict]:
    """Stop recording, and return the allocator's history."""
    noted = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    torch.cuda.memory._record_memory_history(None)
    return noted


def take_work_spaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces now, before we count anything.

    torch 2.11 allocates them like tensors: 8 to 32 MiB each for the forward and backward threads, unless
    `CUBLAS_WORKSPACE_CONFIG` sets a smaller size.
    """
    values = torch.ones(16, 16, device=device, requires_grad=True)
    F.linear(values, values, values[0]).sum().backward()


def requested_points(noted: Iterable[Mapping]) -> list[tuple[float, int]]:
    """Return pairs (Unix time in s, bytes requested from then on) for the tensors created while `noted` was recorded.

    A tensor counts until it's freed. If a stream is still reading its block (`record_stream`), the block can only be
    reused later; that affects reserved memory, but not these numbers.
    """
    points, sizes, total = [], {}, 0
    for entry in noted:
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            total += entry["size"]
        elif entry["action"] == "free_requested" and entry["addr"] in sizes:
            total -= sizes.pop(entry["addr"])
        else:
            continue
        points.append((entry["time_us"] / 1e6, total))
    return points
