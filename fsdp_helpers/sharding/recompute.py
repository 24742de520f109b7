"""Activation checkpointing: keep only a unit's input, and recompute its other activations in backward.

Chen et al. 2016, arXiv:1604.06174. Selective checkpointing also keeps outputs that are expensive to compute and cheap
to keep: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# Fused attention isn't one of them: its dropout draws random numbers, and recomputing must draw the same ones again.
MATRIX_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


def checkpoint_activations(model: nn.Module, names: Sequence[str], kind: str) -> nn.Module:
    """Wrap the named modules in place. Kind "units" recomputes everything, and "selective" all but matrix products.

    If modules are nested, only the outermost is wrapped, since it recomputes everything inside. The names in state
    dicts don't change. Raises ValueError if there's nothing to wrap.
    """
    if not names:
        raise ValueError(f"no module of {type(model).__name__} is large enough to checkpoint; lower min_num_params")
    chosen = {model.get_submodule(name) for name in outermost(names)}
    wrapper = checkpoint_wrapper
    if kind == "selective":
        keep_products = partial(create_selective_checkpoint_contexts, MATRIX_PRODUCTS)
        wrapper = partial(checkpoint_wrapper, context_fn=keep_products)
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: module in chosen)
    return model


def outermost(names: Sequence[str]) -> list[str]:
    """Return the names of the modules that aren't inside another named module."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def is_checkpointed(module: nn.Module) -> bool:
    """Return True for a wrapper that `checkpoint_activations` has added."""
    return isinstance(module, CheckpointWrapper)


def with_wrapper(model: nn.Module, modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Return `modules`, but with the wrapper in place of each module that `checkpoint_activations` has wrapped."""
    around = {wrapper._checkpoint_wrapped_module: wrapper for wrapper in model.modules() if is_checkpointed(wrapper)}
    return {around.get(module, module) for module in modules}
