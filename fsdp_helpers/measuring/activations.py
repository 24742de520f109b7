"""Count the activations that forward keeps for backward."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_helpers.planning.transformer import BlockBytes, transformer_working_bytes
from fsdp_helpers.sharding.recompute import MATRIX_PRODUCTS


def count_block(block: nn.Module, tokens: Tensor) -> BlockBytes:
    """Return the bytes that a transformer block needs in a step on `tokens`, whose shape is (images, tokens, width)."""
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
    """Return the bytes that `model` keeps from forward for backward, excluding parameters; each storage counts once.

    Call this in one process, on a model that isn't sharded, with `inputs` of the shapes that it takes. It isn't trained.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # A storage's address -> a tensor that keeps it alive, so that the address isn't reused
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*inputs)  # as long as it's alive, so is everything it keeps
        del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def products_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Return the bytes of all matrix products' outputs, which selective checkpointing keeps; `inputs` of any shape."""
    with ProductCount() as count, torch.no_grad():
        model(*inputs)
    return count.num_bytes


class ProductCount(TorchDispatchMode):
    """A dispatch mode that adds up the output bytes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in MATRIX_PRODUCTS:
            self.num_bytes += result.nbytes
        return result
