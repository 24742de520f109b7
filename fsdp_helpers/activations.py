"""Activation checkpointing: keep a unit's input, forget the rest, and compute it again in backward.

Chen et al. 2016, arXiv:1604.06174. Selective checkpointing keeps what is dear to compute and cheap to keep:
Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fsdp_helpers.levers import BlockBytes, transformer_working_bytes

# Fused attention is not among them: its dropout draws random numbers, and recomputing must draw the same ones again.
MATRIX_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]

WRAPPERS: dict[str, Callable[[nn.Module], CheckpointWrapper]] = {
    "units": checkpoint_wrapper,
    "selective": partial(checkpoint_wrapper, context_fn=partial(create_selective_checkpoint_contexts, MATRIX_PRODUCTS)),
}


def checkpoint_activations(model: nn.Module, names: Sequence[str], kind: str) -> nn.Module:
    """Wrap the named modules of `model`, in place: "units" recomputes all of each, "selective" all but its products.

    The names in a state dict stay those of the plain model. Raises ValueError where there is nothing to wrap.
    """
    if not names:
        raise ValueError(f"no module of {type(model).__name__} is large enough to checkpoint; lower min_num_params")
    chosen = {model.get_submodule(name) for name in names}
    apply_activation_checkpointing(model, WRAPPERS[kind], check_fn=lambda module: module in chosen)
    return model


def is_checkpointed(module: nn.Module) -> bool:
    """True for a module that `checkpoint_activations` has put around a unit."""
    return isinstance(module, CheckpointWrapper)


def count_block(block: nn.Module, tokens: Tensor) -> BlockBytes:
    """What one transformer block needs in a step, counted on `tokens` (images, tokens, width) of its own precision."""
    images, num_tokens, width = tokens.shape
    return BlockBytes(
        kept_bytes=kept_bytes(block, tokens),
        input_bytes=tokens.nbytes,
        products_bytes=products_bytes(block, tokens),
        working_bytes=transformer_working_bytes(
            images=images, tokens=num_tokens, width=width, value_bytes=tokens.element_size()
        ),
    )


def kept_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes that a forward of `model` keeps for backward, each stretch of memory once; parameters do not count.

    Run it on one process, with a plain model: nothing is trained.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # a storage's address -> a tensor that keeps it alive, so that no address comes twice

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*inputs)  # while it lives, so does what it keeps
        del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def products_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of the outputs of all matrix products in a forward of `model`: what selective checkpointing keeps."""
    with ProductCount() as count, torch.no_grad():
        model(*inputs)
    return count.num_bytes


class ProductCount(TorchDispatchMode):
    """While active, adds up the bytes that matrix products put out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in MATRIX_PRODUCTS:
            self.num_bytes += result.nbytes
        return result
