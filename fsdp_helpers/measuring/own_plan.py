"""Plan your own model: measure one step in one process, and calculate the rest.

A model on the meta device has no values, so its step runs on fake tensors; we count the memory that fused GPU kernels
would need. A model with values is measured on its batch's device.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from fsdp_helpers.measuring.fake_trace import FakeTrace, fake_batch, fake_tensors, is_meta, replace_with_fakes
from fsdp_helpers.measuring.step_profile import StepMarks, cast_inputs, cast_parameters, measure_step, profile_from
from fsdp_helpers.planning.advice import verdict
from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.progress import timed
from fsdp_helpers.quantities import GB
from fsdp_helpers.sharding.recompute import checkpoint_activations

PURE = "pure-bf16"  # everything is in bf16, including the batch and the buffers
LossOf = Callable[[nn.Module, Any], Tensor]
Classes = type[nn.Module] | tuple[type[nn.Module], ...]


def plan_model(
    factory: Callable[[], nn.Module],
    batch: Any,
    *,
    world_size: int,
    device_memory_gb: float | None = None,
    device: str | None = None,
    loss_of: LossOf | None = None,
    unit_class: Classes = (),
    unit_names: Sequence[str] = (),
    bandwidth_gb_s: float | None = None,
    tflops: float | None = None,
    allowance_gb: float | None = None,
    **settings,
) -> tuple[Plan, str]:
    """Plan any model on `world_size` ranks. Return the plan and a one-sentence verdict.

    `factory()` creates the model, on the CPU or on the meta device. `batch` is one rank's input to one forward
    pass: a tensor or any nesting of tensors, with samples along the first dimension. `loss_of(model, batch)` returns
    the loss (default: the sum of the outputs' means). Modules of `unit_class` are FSDP units, which activation
    checkpointing recomputes; `unit_names` names more units, which it doesn't recompute, such as an embedding and a head.
    `device` is a name from `planning.devices`. Numbers that you pass override the device's; without a device, you have
    to pass `device_memory_gb`. `settings` are fields of `planning.plan.Settings`, such as the optimizer and the number
    of micro-batches. The bytes that DDP sends when it broadcasts buffers before each forward pass aren't counted.
    Raises ValueError for an impossible cluster or impossible settings.
    """
    chosen = Settings(batch=num_samples(batch), **settings)
    given = {
        "device_memory_bytes": (device_memory_gb, GB),
        "bandwidth_bytes_per_s": (bandwidth_gb_s, GB),
        "flops_per_s": (tflops, 1e12),
        "allowance_bytes": (allowance_gb, GB),
    }
    numbers = {name: factor * value for name, (value, factor) in given.items() if value is not None}
    if device:
        cluster = Cluster.of(device, world_size, chosen.precision, **numbers)
    elif device_memory_gb is None:
        raise ValueError("the device's memory is missing; give device_memory_gb, or name a device")
    else:
        cluster = Cluster(world_size=world_size, **numbers)
    subject = measured_subject(factory, batch, loss_of or mean_of_outputs, unit_class, unit_names)
    with timed(f"{subject.name}, measured in one process"):
        plan = make_plan(subject, chosen, cluster)
        return plan, verdict(plan, subject)


def measured_subject(
    factory: Callable[[], nn.Module],
    batch: Any,
    loss_of: LossOf,
    unit_class: Classes = (),
    unit_names: Sequence[str] = (),
) -> Subject:
    """Return the model as a subject for a plan. The model isn't measured until a plan needs it.

    Raises ValueError for a model without trainable parameters.
    """
    device = next((leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    model = factory()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no trainable parameters, so there's no step to plan")
    recomputed, units = find_units(model, unit_class, unit_names)
    fake = is_meta(model)

    def build(precision: str, activation_checkpointing: str) -> nn.Module:
        built = factory().train()
        if not fake:
            built = built.to(device, _dtype(precision))
        if activation_checkpointing != "none":
            built = checkpoint_activations(built, recomputed, activation_checkpointing)
        return built

    @cache
    def profile_of(samples: int, precision: str, activation_checkpointing: str) -> StepProfile:
        part = first_samples(batch, samples, _dtype(precision))
        built = build(precision, activation_checkpointing)
        if fake:
            return fake_step(built, part, loss_of, units, precision)
        loss_in = with_autocast(loss_of, device) if precision == "autocast" else loss_of
        return measure_step(built, lambda: loss_in(built, part), units, precision=precision)

    @cache
    def flops_of(samples: int) -> tuple[dict[str, int], dict[str, int]]:
        return count_flops(factory(), first_samples(batch, samples, torch.float32), loss_of, device)

    return Subject(
        name=type(model).__name__,
        item="sample",
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        units=units,
        profile_of=profile_of,
        forward_flops=lambda samples: sum(flops_of(samples)[0].values()),
        unit_flops=lambda samples: flops_of(samples)[0],
        attention_flops=lambda samples: flops_of(samples)[1],
        refused=partial(refused_precision, find_batch_norms(model)),
    )


def _dtype(precision: str) -> torch.dtype:
    """Return the dtype in which to create a model and its batch; under mixed precision, they're cast later."""
    return torch.bfloat16 if precision == PURE else torch.float32


def with_autocast(loss_of: LossOf, device: torch.device) -> LossOf:
    """Return a function that computes the same loss, but under autocast."""

    def loss_in_bf16(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(model, batch)

    return loss_in_bf16


def find_units(
    model: nn.Module, unit_class: Classes, unit_names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two tuples of names: the modules to recompute, and all units. Raises ValueError for an unknown name."""
    recomputed = tuple(name for name, module in model.named_modules() if name and isinstance(module, unit_class))
    named = dict(model.named_modules())
    if unknown := [name for name in unit_names if name not in named]:
        raise ValueError(
            f"{type(model).__name__} has no module {unknown[0]!r}; unit_names must be names of its modules"
        )
    return recomputed, tuple(name for name in named if name and name in {*recomputed, *unit_names})


def find_batch_norms(model: nn.Module) -> list[str]:
    """Return the names of the model's BatchNorm modules."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def refused_precision(batch_norms: list[str], precision: str) -> str | None:
    """Return why a model with these BatchNorms can't run in `precision`, or None if it can."""
    if precision != "bf16" or not batch_norms:
        return None
    return (
        f"{batch_norms[0]!r} is a BatchNorm, whose statistics stay in fp32 while its weights are in bf16, which torch "
        f"doesn't allow under fully_shard; use fp32, or a norm without statistics"
    )


def fake_step(
    model: nn.Module,
    batch: Any,
    loss_of: LossOf,
    units: tuple[str, ...],
    precision: str,
) -> StepProfile:
    """Return a step profile for a model that has no values, as `measure_step` does, but with fake tensors."""
    casts = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    with fake_tensors() as mode, needs_no_values(type(model).__name__):
        replace_with_fakes(model, mode, _dtype(precision))
        part = fake_batch(batch, mode)
        if precision == "bf16":
            cast_parameters(model)
        policy = cast_inputs(model, units) if precision == "bf16" else nullcontext()
        trace = FakeTrace()
        marks = StepMarks(units, trace.mark)
        trace.know(model, part)
        with trace, fused_kernels(), policy, marks.noted(model):
            with casts:
                loss = loss_of(model, part)
            loss.backward()
        model.zero_grad()
        return profile_from(model, marks.moments(trace.between_marks()))


@contextmanager
def needs_no_values(name: str) -> Iterator[None]:
    """Within the block, raise ValueError with an explanation if the model, which has only shapes, needs values.

    For example, a router chooses a token's experts by the token's values, so the number of tokens per expert can't be
    known from shapes.
    """
    try:
        yield
    except (DynamicOutputShapeException, DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        raise ValueError(
            f"the sizes of {name}'s tensors depend on values ("
            f"{error.func if hasattr(error, 'func') else error}), as when a router sends tokens to experts, but there "
            f"are no values on the meta device; give a factory for a smaller model on the CPU, or plan its config.json "
            f"with `python -m fsdp_helpers plan --config`"
        ) from None


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Within the block, fuse RMSNorm and attention as on a GPU. (Unfused, on a CPU, they keep more tensors.)

    A dispatch mode would be simpler, but it wouldn't apply to recomputation in backward.
    """
    norm, attention = F.rms_norm, F.scaled_dot_product_attention

    def fused_norm(inputs: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return norm(inputs, shape, weight, eps) if weight is None else OneKernelNorm.apply(inputs, weight)

    def fused_attention(*inputs: Tensor, is_causal: bool = False, dropout_p: float = 0.0, **others: Any) -> Tensor:
        scale, mask = others.get("scale"), others.get("attn_mask")
        if len(inputs) != 3 or mask is not None:
            return attention(*inputs, is_causal=is_causal, dropout_p=dropout_p, **others)  # type: ignore[misc]
        return torch.ops.aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]

    F.rms_norm, F.scaled_dot_product_attention = fused_norm, fused_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.rms_norm, F.scaled_dot_product_attention = norm, attention


class OneKernelNorm(torch.autograd.Function):
    """An RMSNorm with only a fused kernel's memory: it keeps its input (..., width) and a statistic per token, no values."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, inputs.new_empty(inputs.shape[:-1], dtype=torch.float32), weight)
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, _, weight = ctx.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(weight)


def count_flops(
    model: nn.Module, batch: Any, loss_of: LossOf, device: torch.device | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of operations in each module's forward pass (excluding submodules) and in its attention."""
    # Attention runs as plain products, since torch 2.11 doesn't count a fused kernel's operations on a CPU.
    with fake_tensors() if is_meta(model) else nullcontext() as mode, needs_no_values(type(model).__name__):
        if mode is None:
            model = model.to(device)
        else:
            replace_with_fakes(model, mode, torch.float32)
            batch = fake_batch(batch, mode)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            with attention_counted(counter) as attention:
                loss_of(model, batch)
    root = type(model).__name__
    attention = {(ROOT if name == root else name.removeprefix(f"{root}.")): n for name, n in attention.items()}
    counted_flops = {"Global": counter.get_total_flops()}
    counted_flops |= {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    own = {ROOT: counted_flops.pop("Global")}
    for name in sorted(counted_flops, key=lambda name: name.count(".")):
        flops, plain = counted_flops[name], name.removeprefix(f"{root}.")
        if name == root:
            continue
        own[plain] = flops
        around = [other for other in own if other != plain and (other == ROOT or plain.startswith(f"{other}."))]
        own[max(around, key=len)] -= flops
    return own, attention


@contextmanager
def attention_counted(counter: FlopCounterMode) -> Iterator[dict[str, int]]:
    """Within the block, count the operations in `scaled_dot_product_attention`, grouped by the calling module."""
    attention, found = F.scaled_dot_product_attention, Counter()

    def counted_attention(*inputs: Any, **others: Any) -> Tensor:
        before = counter.get_total_flops()
        result = attention(*inputs, **others)
        found[max(counter.mod_tracker.parents - {"Global"}, key=len)] += counter.get_total_flops() - before
        return result

    F.scaled_dot_product_attention = counted_attention  # type: ignore[assignment]
    try:
        yield found
    finally:
        F.scaled_dot_product_attention = attention


def mean_of_outputs(model: nn.Module, batch: Any) -> Tensor:
    """Return the sum of the output means, a scalar loss; items of a tuple or list are passed as separate arguments."""
    outputs = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return torch.stack([leaf.float().mean() for leaf in tree_leaves(outputs) if leaf.is_floating_point()]).sum()


def num_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of the tensors that have the most dimensions.

    For example, tokens of shape (4, 64) and positions of shape (64,) are four samples: a tensor with fewer dimensions
    than another may have no sample dimension. A length of 1 is broadcast over the batch, so it counts only if all these
    tensors have it. Raises ValueError unless that leaves exactly one length.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    widest = max((tensor.ndim for tensor in tensors), default=0)
    lengths = {len(tensor) for tensor in tensors if tensor.ndim == widest}
    lengths = lengths - {1} or lengths
    if len(lengths) != 1:
        raise ValueError(
            f"the batch has tensors of {sorted(lengths)} samples; all must have the same number, at least one, along the "
            f"first dimension"
        )
    return lengths.pop()


def first_samples(batch: Any, samples: int, dtype: torch.dtype) -> Any:
    """Return the batch with only its first samples, and floats cast to `dtype`; tensors without samples stay whole."""
    length = num_samples(batch)

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        part = leaf[:samples] if leaf.ndim and len(leaf) == length else leaf
        return part.to(dtype) if part.is_floating_point() else part

    return tree_map(first, batch)
