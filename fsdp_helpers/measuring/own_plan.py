"""A plan for a model of one's own: one step of one process, measured here, and arithmetic for the rest."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from fsdp_helpers.measuring.step_profile import measure_step
from fsdp_helpers.planning.advice import verdict
from fsdp_helpers.planning.models import Subject
from fsdp_helpers.planning.plan import LINK_BYTES_PER_S, Cluster, Plan, Settings, make_plan
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.quantities import GB
from fsdp_helpers.ranks.progress import counted
from fsdp_helpers.sharding.recompute import checkpoint_activations

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LossOf = Callable[[nn.Module, Any], Tensor]


def plan_model(
    factory: Callable[[], nn.Module],
    batch: Any,
    *,
    world_size: int,
    device_memory_gb: float,
    loss_of: LossOf | None = None,
    unit_class: type[nn.Module] | tuple[type[nn.Module], ...] = (),
    bandwidth_gb_s: float = LINK_BYTES_PER_S / GB,
    tflops: float | None = None,
    **settings,
) -> tuple[Plan, str]:
    """Plan any model on `world_size` ranks; return the plan and its verdict in a sentence.

    `factory()` makes the model on the CPU; `batch` is what one rank has in one forward, a tensor or any nest of them,
    with samples along their first dimension. `loss_of(model, batch)` is its loss, the mean of all outputs if it is left
    out. Modules of `unit_class` are FSDP units, and what activation checkpointing recomputes. `settings` are those of
    `planning.plan.Settings`. Activations are those of the device on which `batch` lies.
    Buffers, which DDP broadcasts before each forward, are left out.
    Raises ValueError for a cluster or settings that cannot be.
    """
    subject = measured_subject(factory, batch, loss_of or mean_of_outputs, unit_class)
    cluster = Cluster(
        world_size=world_size,
        device_memory_bytes=device_memory_gb * GB,
        bandwidth_bytes_per_s=bandwidth_gb_s * GB,
        flops_per_s=None if tflops is None else tflops * 1e12,
    )
    with counted(f"{subject.name}, measured in one process"):
        plan = make_plan(subject, Settings(batch=num_samples(batch), **settings), cluster)
        return plan, verdict(plan, subject)


def measured_subject(
    factory: Callable[[], nn.Module],
    batch: Any,
    loss_of: LossOf,
    unit_class: type[nn.Module] | tuple[type[nn.Module], ...] = (),
) -> Subject:
    """The model as a planner sees it; what a plan asks for is measured then, and only once."""
    device = next((leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    model = factory().to(device)
    units = tuple(name for name, module in model.named_modules() if name and isinstance(module, unit_class))

    @cache
    def profile_of(samples: int, precision: str, activation_checkpointing: str) -> StepProfile:
        model = factory().to(device, DTYPES[precision]).train()
        if activation_checkpointing != "none":
            model = checkpoint_activations(model, units, activation_checkpointing)
        part = first_samples(batch, samples, DTYPES[precision])
        return measure_step(model, lambda: loss_of(model, part))

    @cache
    def forward_flops(samples: int) -> int:
        # Attention as plain products: torch 2.11 does not count those of a fused kernel on a CPU.
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            loss_of(model, first_samples(batch, samples, torch.float32))
        return counter.get_total_flops()

    return Subject(
        name=type(model).__name__,
        item="sample",
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        units=units,
        profile_of=profile_of,
        forward_flops=forward_flops,
    )


def mean_of_outputs(model: nn.Module, batch: Any) -> Tensor:
    """A loss for a model whose own one does not matter: its outputs' mean. A tuple or list is several arguments."""
    outputs = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return torch.stack([leaf.float().mean() for leaf in tree_leaves(outputs) if leaf.is_floating_point()]).sum()


def num_samples(batch: Any) -> int:
    """The length of the first dimension of the batch's tensors. Raises ValueError where there is none."""
    lengths = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(lengths) != 1:
        raise ValueError(f"the batch has tensors of {sorted(lengths)} samples; all need the same number, at least one")
    return lengths.pop()


def first_samples(batch: Any, samples: int, dtype: torch.dtype) -> Any:
    """Return the first samples, floating-point ones in `dtype`."""

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf[:samples].to(dtype) if leaf.is_floating_point() else leaf[:samples]

    return tree_map(first, batch)
