"""Record FSDP2's offload copies between host and device: which tensor, how many bytes, and when."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FULLY_SHARD = "torch.distributed.fsdp._fully_shard."  # the package with FSDP2's own code
TO_DEVICE, TO_HOST = "to the device", "to the host"
Seen = tuple[float, Tensor, Tensor]  # time in s, the tensor to copy, the copy


@dataclass(frozen=True, kw_only=True)
class OffloadCopy:
    """A copy of a parameter shard to the device, or of a gradient shard to the host."""

    name: str  # the parameter's name
    way: str  # TO_DEVICE or TO_HOST
    bytes: int
    start_s: float  # on the clock of `time.perf_counter()`
    was_made: bool  # False if host and device are the same: then the shard stays where it is

    def unit(self, units: Sequence[str]) -> str:
        """Return the name of the innermost unit that contains the parameter, or "root"."""
        return max((unit for unit in units if self.name.startswith(f"{unit}.")), key=len, default="root")


@contextmanager
def trace_copies(model: nn.Module) -> Iterator[list[OffloadCopy]]:
    """Within the block, record the copies in a step of `model`; the yielded list is filled when the block ends.

    This records every `tensor.to(device)` in FSDP2's own code, which is how its offload policy copies. If the tensor is
    already on that device, `to` returns it unchanged. So on the CPU, we see the calls, with their bytes and times, even
    though nothing is copied. End the block before you free the gradients.
    """
    found: list[OffloadCopy] = []
    seen: list[Seen] = []
    to = Tensor.to

    def noting_to(tensor: Tensor, *args, **kwargs) -> Tensor:
        start_s = time.perf_counter()
        result = to(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if args and isinstance(args[0], torch.device) and caller.startswith(FULLY_SHARD):
            seen.append((start_s, tensor.detach(), result.detach()))
        return result

    Tensor.to = noting_to
    try:
        yield found
    finally:
        Tensor.to = to
    found += name_offload_copies(model, seen)


def name_offload_copies(model: nn.Module, recorded: Sequence[Seen]) -> list[OffloadCopy]:
    """Return the recorded copies, named after `model`'s parameters; empty shards of small parameters are left out."""
    parameters = {_memory(parameter): name for name, parameter in model.named_parameters()}
    gradients = {
        _own(parameter.grad).data_ptr(): name  # a unit's gradients share a buffer
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return [
        OffloadCopy(
            name=parameters.get(_memory(before)) or gradients[after.data_ptr()],
            way=TO_DEVICE if _memory(before) in parameters else TO_HOST,
            bytes=after.nbytes,
            start_s=start_s,
            was_made=_memory(before) != _memory(after),
        )
        for start_s, before, after in recorded
        if after.nbytes
    ]


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _memory(tensor: Tensor) -> int:
    """Return the address of this rank's shard of `tensor`, padding included."""
    return _own(tensor).untyped_storage().data_ptr()
