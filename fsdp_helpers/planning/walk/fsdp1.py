"""A rank of FSDP1: what `FullyShardedDataParallel` gathers, joins, reduces and frees, event by event. No torch.

The order is that of torch 2.15, `_runtime_utils.py` and `_flat_param.py` in `torch/distributed/fsdp`.
"""

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import ROOT
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.walk.units import Shards, Unit

SENT, IN_FP32 = "slice to be gathered", "gradients in fp32"


class FlatParameters:
    """A unit's parameters are views of one flat tensor. On one rank it is not sharded, and always there."""

    def __init__(self, shards: Shards, config: TrainConfig) -> None:
        self.units, self._shards, self._ranks = shards.units, shards, shards.ranks
        self._prefetch = config.backward_prefetch
        self._value_bytes = 2 if config.precision == "bf16" else FP32_BYTES  # of what is gathered, and its gradient
        self._frees_after_forward = config.sharding != "grad-op"
        self._forwards: list[Unit] = []  # in the order in which they ended

    def begin_part(self, *, reduces: bool, is_last: bool) -> None:
        self._reduces = reduces

    def enter_forward(self, name: str) -> None:
        self._gather(self.units[name])

    def leave_forward(self, name: str) -> None:
        unit = self.units[name]
        self._forwards.append(unit)
        if name != ROOT and self._frees_after_forward:
            self._shards.free_gathered(unit)

    def enter_backward(self, name: str) -> None:
        """Gather, where it is not there, and the unit that comes next."""
        self._gather(self.units[name])
        if self._prefetch == "pre":
            self._gather_next(self.units[name])

    def gradient(self, name: str) -> None:
        self._shards.take_gradient(name, self._value_bytes)

    def leave_backward(self, name: str) -> None:
        """Join the gradients to a flat one, free the parameters, and take a slice of the sum."""
        unit = self.units[name]
        if not self._shards.waiting(unit):
            return
        self._shards.take_flat_gradient("joined", unit, self._value_bytes)
        self._shards.free_gradients(unit)
        self._shards.free_flat_gradient("joined", unit)  # it is the flat one, or added to that of an earlier part
        self._shards.take_flat_gradient("flat", unit, self._value_bytes)
        self._shards.free_gathered(unit)
        if self._prefetch == "post":
            self._gather_next(unit)
        if self._reduces and self._ranks > 1:
            self._reduce(unit)
        elif self._reduces:
            self._shards.all_reduce(unit)

    def end_backward(self) -> None:
        """The root comes last, with any unit whose input needs no gradient."""
        for name in self.units:
            self.leave_backward(name)
        self._forwards.clear()

    def _gather(self, unit: Unit) -> None:
        if self._ranks == 1 or self._shards.is_gathered(unit):
            return
        if self._value_bytes < FP32_BYTES:
            self._shards.take_buffer(SENT, unit, unit.padded, self._value_bytes, self._ranks)
        self._shards.gather(unit, self._value_bytes)
        self._shards.communicate("all_gather", unit, self._value_bytes)
        self._shards.free_buffer(SENT, unit)

    def _gather_next(self, unit: Unit) -> None:
        before = self._forwards.index(unit) - 1
        if before >= 0:
            self._gather(self._forwards[before])

    def _reduce(self, unit: Unit) -> None:
        if self._value_bytes < FP32_BYTES:
            self._shards.take_buffer(IN_FP32, unit, unit.padded)
        self._shards.take_slice(unit)
        self._shards.communicate("reduce_scatter", unit)
        self._shards.all_reduce(unit)
        self._shards.free_buffer(IN_FP32, unit)
        self._shards.free_flat_gradient("flat", unit)
