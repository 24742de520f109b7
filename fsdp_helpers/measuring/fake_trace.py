"""Run a step on fake tensors, which have shapes but no values, and count the memory that real ones would take.

A fake tensor has a shape, a dtype and a device, but no memory. A dispatch mode sees every operation and counts the
results' storages until they're freed. The mode can't see memory that an operation allocates internally.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def is_meta(model: nn.Module) -> bool:
    """Return True if any parameter is on the meta device, where it has a shape but no values."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within the block, make new tensors fake, and use only the shapes of real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def replace_with_fakes(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """Replace each parameter and buffer in place with a fake tensor on the CPU, in `dtype` if it's floating-point.

    Returns the model. Tied parameters stay tied.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                kept = dtype if tensor.is_floating_point() else tensor.dtype
                empty = torch.empty(tensor.shape, dtype=kept, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    alive = [*model.parameters(), *model.buffers()]  # so that no id is reused
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
    del alive
    return model


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return the batch with fake CPU tensors in place of real ones."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")

    return tree_map(fake, batch)


class FakeTrace(TorchDispatchMode):
    """A dispatch mode that keeps a running total of result bytes; `mark` begins a new interval."""

    def __init__(self) -> None:
        super().__init__()
        self._known: weakref.WeakSet = weakref.WeakSet()
        self._bytes = 0
        self._stretches: list[list[int]] = []  # for each mark: the bytes at that point, and the peak since then

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def know(self, model: nn.Module, batch: Any) -> None:
        """Remember the tensors in the model and the batch, so that they aren't counted."""
        for tensor in [*model.parameters(), *model.buffers(), *tree_leaves(batch)]:
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())

    def mark(self) -> None:
        self._stretches.append([self._bytes, self._bytes])

    def between_marks(self) -> list[tuple[int, int]]:
        """Return two numbers per interval: the bytes at its start, and the peak until the next interval begins."""
        return [(start, most) for start, most in self._stretches]

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self._bytes += size
        weakref.finalize(storage, self._gone, size)
        if self._stretches:
            self._stretches[-1][1] = max(self._stretches[-1][1], self._bytes)

    def _gone(self, size: int) -> None:
        self._bytes -= size
