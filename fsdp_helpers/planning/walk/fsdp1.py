"""A rank of FSDP1: what `FullyShardedDataParallel` gathers, joins, reduces and frees, event by event. No torch.

The order is that of torch 2.15, `_runtime_utils.py` and `_flat_param.py` in `torch/distributed/fsdp`.
"""

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import ROOT
from fsdp_helpers.planning.walk.units import Shards, Unit

SENT, IN_FP32 = "slice to be gathered", "gradients in fp32"


class FlatParameters:
    """A unit's parameters are views of one flat tensor. On one rank it is not sharded, and always there."""

    def __init__(self, shards: Shards, config: TrainConfig) -> None:
        # an empty unit does nothing; an empty root computes
        self.units = {name: unit for name, unit in shards.units.items() if unit.parameters or name == ROOT}
        self._shards, self._ranks = shards, shards.ranks
        self._prefetch = config.backward_prefetch
        self._frees_after_forward = config.sharding != "grad-op"
        self._forwards: list[Unit] = []  # in the order in which they first ended
        self._in_backward: set[str] = set()

    def begin_part(self, *, reduces: bool, is_last: bool) -> None:
        self._reduces = reduces
        self._backward_runs = False

    def enter_forward(self, name: str) -> None:
        self._gather(self.units[name])

    def leave_forward(self, name: str) -> None:
        """Free the parameters, unless they are recomputed for a backward that has begun."""
        unit = self.units[name]
        if name in self._in_backward:
            return
        if not self._backward_runs:
            self._shards.compute("forward", unit)
        if unit.parameters and unit not in self._forwards:
            self._forwards.append(unit)
        if name != ROOT and self._frees_after_forward:
            self._shards.free_gathered(unit)

    def enter_backward(self, name: str) -> None:
        """Gather the unit, unless it is there, and prefetch the next one."""
        self._backward_runs = True
        if name in self._in_backward:
            return
        self._in_backward.add(name)
        self._gather(self.units[name])
        self._shards.compute("backward", self.units[name])
        if self._prefetch == "pre" and self.units[name] in self._forwards:
            self._gather_next(self.units[name])

    def gradient(self, name: str) -> None:
        self._shards.take_gradient(name, self._shards.sizes.gathered)

    def leave_backward(self, name: str) -> None:
        """Join the gradients to a flat one, free the parameters, and take a slice of the sum."""
        unit = self.units[name]
        self._in_backward.discard(name)
        if not self._shards.waiting(unit):
            if not unit.is_trained:
                self._shards.free_gathered(unit)
            return
        self._shards.take_flat_gradient("joined", unit)
        self._shards.free_gradients(unit)
        self._shards.free_flat_gradient("joined", unit)  # it is the flat one, or added to that of an earlier part
        self._shards.take_flat_gradient("flat", unit)
        self._shards.free_gathered(unit)
        if self._prefetch == "post":
            self._gather_next(unit)
        if self._reduces and self._ranks > 1:
            self._reduce(unit)
        elif self._reduces:
            self._shards.all_reduce(unit, unit.padded)

    def update(self) -> None:
        self._shards.update()

    def end_backward(self) -> None:
        """Units whose input needs no gradient come late, and the root last."""
        for name in sorted(self.units, key=lambda name: name == ROOT):
            self.leave_backward(name)
            if self._ranks > 1:
                self._shards.free_gathered(self.units[name])
        self._forwards.clear()
        self._in_backward.clear()

    def _gather(self, unit: Unit) -> None:
        if self._ranks == 1 or self._shards.is_gathered(unit) or not unit.parameters:
            return
        sizes = self._shards.sizes
        if sizes.gathered < sizes.kept:
            self._shards.take_buffer(SENT, unit, unit.padded, sizes.gathered, self._ranks)
        self._shards.gather(unit)
        self._shards.all_gather(unit)
        self._shards.free_buffer(SENT, unit)

    def _gather_next(self, unit: Unit) -> None:
        before = self._forwards.index(unit) - 1
        if before >= 0:
            self._gather(self._forwards[before])

    def _reduce(self, unit: Unit) -> None:
        sizes = self._shards.sizes
        if sizes.gathered < sizes.reduced:
            self._shards.take_buffer(IN_FP32, unit, unit.padded, sizes.reduced)
        self._shards.take_slice(unit, unit.padded)
        self._shards.reduce_scatter(unit, unit.padded)
        self._shards.all_reduce(unit, unit.padded)
        self._shards.free_buffer(IN_FP32, unit)
        self._shards.free_flat_gradient("flat", unit)
