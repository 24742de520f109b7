"""Measure a step in one process: how activations grow and shrink, and when each gradient is finished.

From this profile, `planning.peak` predicts the peak for any number of ranks.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import one_thread, trace_memory
from fsdp_helpers.models.series import build_model
from fsdp_helpers.planning.peak import walk_step
from fsdp_helpers.planning.profile import Moment, StepProfile
from fsdp_helpers.planning.walk.ledger import Peak
from fsdp_helpers.records import RunRecord
from fsdp_helpers.sharding.strategies import recompute_units
from fsdp_helpers.sharding.wrapping import choose_units, plain_name, size_policy

MARK = "fsdp_helpers moment"
CUT_BY_SIZE = ("fsdp-auto-wrap", "fsdp-offload")  # the strategies with units below the root
WRAPPED = "_checkpoint_wrapped_module"  # a module's name inside its activation checkpointing wrapper


def measure_step(
    model: nn.Module,
    compute_loss: Callable[[], Tensor],
    units: Collection[str] = (),
    *,
    precision: str = "fp32",
) -> StepProfile:
    """Profile one forward pass (`compute_loss()`) and backward pass of the unsharded `model` in one process.

    Parameters aren't updated, and gradients are discarded. If units are checkpointed, recomputation is part of the
    measurement. Backward is recorded as leaving one of `units` when FSDP2 would leave it. If another module also uses
    the unit's input, that may be before the input's gradient is complete. With `precision` "bf16", an fp32 model
    computes as under FSDP's mixed precision (see `cast_by_policy`), and its parameters stay in bf16. On a CPU,
    convolutions take scratch memory for each thread, so give this process as many threads as a rank has.
    """
    casts = cast_by_policy(model, units) if precision == "bf16" else nullcontext()
    with casts:
        compute_loss().backward()  # memory that only the first step allocates doesn't count
        model.zero_grad()
        gc.collect()  # otherwise, memory allocated earlier might be freed within the trace

        marks = StepMarks(units)
        with trace_memory(next(model.parameters()).device) as trace, marks.noted(model):
            compute_loss().backward()
        model.zero_grad()
        return profile_from(model, marks.moments(trace.between_marks(MARK)))


@contextmanager
def cast_by_policy(model: nn.Module, units: Collection[str] = ()) -> Iterator[None]:
    """Within the block, make `model` compute in bf16 as under FSDP's mixed precision; its parameters stay in bf16.

    torch uses one thread, as CPU ranks usually do.
    """
    cast_parameters(model)
    with one_thread(), cast_inputs(model, units):
        yield


def cast_parameters(model: nn.Module) -> None:
    """Cast the parameters to bf16 in place; buffers keep their dtype, as under FSDP's mixed precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def cast_inputs(model: nn.Module, units: Collection[str] = ()) -> Iterator[None]:
    """Within the block, cast the inputs of the root and of all `units` to bf16.

    The cast copies take memory, and autograd may keep them until backward. If a value is combined with an fp32 buffer
    inside a unit, the result is fp32, as in a real run. Source: torch 2.15, `FSDPState._cast_forward_inputs`.
    """
    handles = [
        module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        for name, module in model.named_modules()
        if not name or plain_name(name) in units and not name.endswith(WRAPPED)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    def cast(leaf: Any) -> Any:
        return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, (args, kwargs))


def profile_from(model: nn.Module, moments: tuple[Moment, ...]) -> StepProfile:
    """Return the profile of `model` and the moments of its step."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = list(model.named_parameters(remove_duplicate=False))
    return StepProfile(
        shapes={plain_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()},
        moments=moments,
        frozen=frozenset(plain_name(name) for name, parameter in every if not parameter.requires_grad),
        tied={plain_name(name): plain_name(first[id(p)]) for name, p in every if first[id(p)] != name},
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )


def measure_run(config: TrainConfig, world_size: int, device: str = "cpu") -> StepProfile:
    """Return the profile of one rank's micro-batch in a run with `config`, measured in one process."""
    model = recompute_units(build_model(config.model, dropout=config.dropout), config).to(device).train()
    num_images = config.global_batch_size // world_size // config.micro_batches
    images = torch.randn(num_images, 1, 28, 28, device=device)
    labels = torch.zeros(num_images, dtype=torch.long, device=device)
    return measure_step(model, lambda: F.cross_entropy(model(images).float(), labels), precision=config.precision)


def predicted_peaks(runs: Mapping[str, RunRecord], backend: str | None = None) -> dict[str, Peak]:
    """Return each run's predicted peak, calculated from one micro-batch that's measured here in one process.

    Runs that differ only in their sharding share a measurement. `backend` is "gloo" or "nccl"; by default, it's the
    run's own backend.
    """
    profiles: dict[tuple, StepProfile] = {}
    peaks = {}
    for name, run in runs.items():
        config, ranks, step = run.config, run.world_size, _measured_in(run)
        if step not in profiles:
            profiles[step] = measure_run(config, ranks, run.device)
        chosen = backend or ("gloo" if run.device == "cpu" else "nccl")
        has_host = run.device == "cuda"  # offloaded state leaves the device
        peaks[name] = walk_step(profiles[step], config, ranks, units_of(config), backend=chosen, has_host=has_host).peak
    return peaks


def _measured_in(run: RunRecord) -> tuple:
    """Return the settings that `measure_run` depends on. Sharding affects only which units are recomputed."""
    config = run.config
    images = config.global_batch_size, run.world_size, config.micro_batches
    recomputed = config if config.activation_checkpointing != "none" else None
    return config.model, config.dropout, config.precision, *images, run.device, recomputed


def units_of(config: TrainConfig) -> list[str]:
    """Return the names of the units below the root in a run with `config`."""
    if config.strategy not in CUT_BY_SIZE:
        return []
    with torch.device("meta"):  # shapes are enough
        return choose_units(build_model(config.model), size_policy(config.min_num_params))


class StepMarks:
    """Hooks that mark a step's events in a memory trace, on every module with parameters."""

    def __init__(self, units: Collection[str] = (), mark: Callable[[], None] | None = None) -> None:
        self._units, self._mark = units, mark or _mark_in_trace
        self._events: list[tuple[str, str, int]] = []  # event, name, bytes of the gradient that it finishes
        self._in_backward = False  # forward hooks that are called during backward are called by recomputation

    @contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Within the block, record the events in `model`'s forward and backward passes.

        Everything allocated from the start of the block counts, even before the model is called: for example, noise
        that's added to a batch, or a cast copy of it.
        """
        self._mark()
        handles = []
        for name, module in model.named_modules():
            if any(True for _ in module.parameters()) and not name.endswith(WRAPPED):
                handles.append(module.register_forward_pre_hook(self._before(plain_name(name)), with_kwargs=True))
                handles.append(module.register_forward_hook(self._after(plain_name(name))))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._finished(plain_name(name))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def moments(self, sizes: list[tuple[int, int]]) -> tuple[Moment, ...]:
        """Return the events as moments; `sizes` has the bytes at each mark, and the peak until the next mark."""
        (start_bytes, _), *sizes = sizes
        gradient_bytes, found = 0, []
        for (event, name, finished_bytes), (now, highest) in zip(self._events, sizes, strict=True):
            gradient_bytes += finished_bytes
            other_bytes = start_bytes + gradient_bytes
            found.append(
                Moment(event=event, name=name, activation_bytes=now - other_bytes, highest_bytes=highest - other_bytes)
            )
        return settle(found)

    def _note(self, event: str, name: str, gradient_bytes: int = 0) -> None:
        self._in_backward = self._in_backward or "forward" not in event
        self._events.append((event, name, gradient_bytes))
        self._mark()

    def _before(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            self._note("enter_forward", name)
            inputs = _with_gradient((args, kwargs))
            if self._in_backward or not inputs:
                return None
            if name in self._units:
                return self._left_as_a_unit(name, args, kwargs, inputs)
            # The last thing that a module's backward computes is the gradient of its input
            inputs[0].register_hook(lambda _: self._note("leave_backward", name))
            return None

        return hook

    def _left_as_a_unit(self, name: str, args: tuple, kwargs: dict, inputs: list[Tensor]) -> tuple[tuple, dict]:
        """Pass a unit's inputs through a function, as FSDP2 does, so that backward runs it on leaving the unit."""
        passed = LeaveBackward.apply(lambda: self._note("leave_backward", name), *inputs)
        instead = {id(tensor): other for tensor, other in zip(inputs, passed, strict=True)}
        return tree_map(lambda leaf: instead.get(id(leaf), leaf), (args, kwargs))

    def _after(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            self._note("leave_forward", name)
            if not self._in_backward:
                self._enter_once(name, _with_gradient(output))

        return hook

    def _enter_once(self, name: str, outputs: list[Tensor]) -> None:
        """When the gradient of any of a module's outputs is available, record that backward enters the module."""
        entered = False

        def hook(_: Tensor) -> None:
            nonlocal entered
            if not entered:
                entered = True
                self._note("enter_backward", name)

        for tensor in outputs:
            tensor.register_hook(hook)

    def _finished(self, name: str) -> Callable:
        return lambda parameter: self._note("gradient", name, parameter.grad.nbytes)


class LeaveBackward(torch.autograd.Function):
    """A function that passes tensors of any shape through unchanged, and records when their gradients come back."""

    @staticmethod
    def forward(ctx: Any, said: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.said = said
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.said()
        return (None, *gradients)


def _mark_in_trace() -> None:
    with record_function(MARK):
        pass


def settle(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Reorder backward events at the same tensor: leaving modules (inner ones first) comes before entering others.

    This is necessary because one module's output is the next one's input, and a tensor's hooks are called in forward
    order.
    """
    settled: list[Moment] = []
    at_tensor: list[Moment] = []
    for moment in moments:
        if at_tensor and not _is_at_the_same_tensor(at_tensor[-1], moment):
            settled += _left_first(at_tensor)
            at_tensor = []
        (at_tensor if "_backward" in moment.event else settled).append(moment)
    return (*settled, *_left_first(at_tensor))


def _is_at_the_same_tensor(before: Moment, moment: Moment) -> bool:
    """Return True if nothing was allocated or freed between two events in backward."""
    return "_backward" in moment.event and before.activation_bytes == before.highest_bytes == moment.activation_bytes


def _left_first(moments: list[Moment]) -> list[Moment]:
    left = [moment for moment in reversed(moments) if moment.event == "leave_backward"]
    entered = [moment for moment in moments if moment.event == "enter_backward"]
    sizes = [moment.highest_bytes for moment in moments]  # all the same, except the last
    return [replace(moment, highest_bytes=size) for moment, size in zip(left + entered, sizes, strict=True)]


def _with_gradient(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
