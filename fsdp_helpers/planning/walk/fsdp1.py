"""Walk through a step of an FSDP1 rank: what `FullyShardedDataParallel` unshards, joins, reduces and frees.

No torch import. The order of events comes from torch 2.15, `_runtime_utils.py` and `_flat_param.py` in
`torch/distributed/fsdp`.

A module computes with views of the flat tensor, and each forward pass makes new views. Autograd joins their gradients
once all of them exist, adds up the gradients of several uses, and then calls FSDP1, which reduces the sum. A flat
tensor with any trained parameter needs a gradient, so its frozen parameters get one, too (`StepProfile.flat_moments`).
"""

from collections import Counter

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.planning.walk.units import Shards, Unit

SENT, IN_FP32 = "shard to be gathered", "gradients in fp32"
FLAT, JOINED, THIS_USE, OTHER_USES = "flat", "joined", "of this use", "of the other uses"


class FlatParameters:
    """A rank whose units each have one flat tensor; the parameters are views of this tensor.

    On a single rank (or with `sharding` "none"), the flat tensor isn't sharded: it's always in memory, and unsharding
    only casts it, if the precision requires that.
    """

    def __init__(self, shards: Shards, config: TrainConfig, profile: StepProfile) -> None:
        # An empty unit does nothing, but an empty root still computes
        self.units = {name: unit for name, unit in shards.units.items() if unit.parameters or name == ROOT}
        self._shards, self._ranks = shards, shards.ranks
        self._prefetch = config.backward_prefetch
        self._frees_after_forward = config.sharding != "grad-op"
        self._forwards: list[Unit] = []  # in the order in which they ended; a unit appears once per use
        self._places: dict[str, int] = {}  # each unit's position in that order
        self._entered = {moment.name for moment in profile.flat_moments if moment.event == "enter_backward"}
        self._awaited: set[str] = set()  # units to all-gather for a backward pass that hasn't begun
        self._in_backward: set[str] = set()
        # How many gradients each unit gets in one backward pass
        self._gradients = Counter(
            shards.unit_of(moment.name).name for moment in profile.flat_moments if moment.event == "gradient"
        )

    def begin_part(self, *, reduces: bool) -> None:
        self._reduces = reduces
        self._backward_runs = False
        self._missing = Counter(self._gradients)
        self._used: set[str] = set()  # units that already have a flat gradient, from a later use in forward

    def enter_forward(self, name: str) -> None:
        self._gather(self.units[name])

    def leave_forward(self, name: str) -> None:
        """Reshard, unless this forward pass is a recomputation for a backward pass that has begun."""
        unit = self.units[name]
        if name in self._in_backward:
            return
        if not self._backward_runs:
            self._shards.compute("forward", unit)
        if unit.parameters:
            # The position of the first use. But torch takes 0 to mean no position, so the first unit gets that of its
            # second use.
            self._places[name] = self._places.get(name) or len(self._forwards)
            self._forwards.append(unit)
            if name in self._entered:  # a unit computed under no_grad has no backward, and is never prefetched for one
                self._awaited.add(name)
        if self._ranks == 1 or (name != ROOT and self._frees_after_forward):
            self._shards.free_gathered(unit)

    def enter_backward(self, name: str) -> None:
        """Unshard the unit if it's still sharded, and prefetch the next one; only the unit's first use does this."""
        self._backward_runs = True
        unit = self.units[name]
        if name in self._in_backward:
            self._shards.compute("backward", unit)
            return
        self._in_backward.add(name)
        self._awaited.discard(name)
        self._gather(unit)
        self._shards.compute("backward", unit)
        if self._prefetch == "pre":
            self._gather_next(unit)

    def gradient(self, name: str) -> None:
        """Hold one parameter's gradient. FSDP1 acts when the unit's last gradient arrives."""
        unit = self._shards.unit_of(name)
        self._shards.take_gradient(name, self._shards.sizes.gathered)
        self._missing[unit.name] -= 1
        if not self._missing[unit.name]:
            self._leave(unit)

    def leave_backward(self, name: str) -> None:
        """Free a frozen unit, or join the gradients of a use that isn't the last; `gradient` does the rest."""
        unit = self.units[name]
        if not unit.is_trained:
            self._in_backward.discard(name)
            self._shards.free_gathered(unit)
        elif self._missing[name] and name != ROOT:
            self._join_one_use(unit)

    def _join_one_use(self, unit: Unit) -> None:
        """Join the gradients from one use into a flat gradient. The profile has only the sum over all uses so far."""
        if unit.name in self._used:
            self._shards.take_flat_gradient(THIS_USE, unit)
        self._shards.take_flat_gradient(JOINED, unit)
        self._shards.free_flat_gradient(JOINED, unit)
        self._shards.free_flat_gradient(THIS_USE, unit)
        self._used.add(unit.name)

    def _leave(self, unit: Unit) -> None:
        """Join the gradients into a flat gradient, reshard, and keep a shard of the sum over all ranks."""
        self._in_backward.discard(unit.name)
        is_added = self._is_added(unit)
        if unit.name in self._used:
            self._shards.take_flat_gradient(OTHER_USES, unit)
        self._shards.take_flat_gradient(JOINED, unit)
        self._shards.free_gradients(unit)
        self._shards.free_flat_gradient(OTHER_USES, unit)
        if not is_added:  # it becomes the flat gradient
            self._shards.free_flat_gradient(JOINED, unit)
        self._shards.take_flat_gradient(FLAT, unit)
        self._shards.free_gathered(unit)
        if self._prefetch == "post":
            self._gather_next(unit)
        if self._reduces and self._ranks > 1:
            self._reduce(unit)
        elif self._reduces:
            self._all_reduce(unit)
        self._shards.free_flat_gradient(JOINED, unit)

    def _is_added(self, unit: Unit) -> bool:
        """Return True if autograd adds the last use's gradient to an earlier one, and keeps both until FSDP1 is done.

        The earlier gradient may come from an earlier micro-batch. In a lower precision, it may also come from a later
        use in forward: unsharding then changes the flat tensor's dtype, so torch gives each use its own accumulator
        (`set_data` in `torch/csrc/autograd/variable.cpp`). Otherwise, autograd adds up the uses before the accumulator.
        """
        sizes = self._shards.sizes
        each_use = unit.name in self._used and sizes.gathered < sizes.kept
        return each_use or self._shards.has_flat_gradient(FLAT, unit)

    def update(self) -> None:
        self._shards.update()

    def end_backward(self) -> None:
        """Free units that were unsharded for a backward pass that never ran, and frozen parameters that went unused."""
        for unit in self.units.values():
            self._shards.free_gathered(unit)
        self._forwards.clear()
        self._places.clear()
        self._awaited.clear()
        self._in_backward.clear()

    def _gather(self, unit: Unit) -> None:
        sizes = self._shards.sizes
        is_cast = sizes.gathered < sizes.kept
        if self._shards.is_gathered(unit) or not unit.parameters or (self._ranks == 1 and not is_cast):
            return
        if self._ranks == 1:
            self._shards.gather(unit)
            return
        if is_cast:
            self._shards.take_buffer(SENT, unit, unit.padded, sizes.gathered, self._ranks)
        self._shards.gather(unit)
        self._shards.all_gather(unit)
        self._shards.free_buffer(SENT, unit)

    def _gather_next(self, unit: Unit) -> None:
        place = self._places.get(unit.name, 0)
        if place and self._forwards[place - 1].name in self._awaited:
            self._gather(self._forwards[place - 1])

    def _reduce(self, unit: Unit) -> None:
        sizes = self._shards.sizes
        if sizes.gathered < sizes.reduced:
            self._shards.take_buffer(IN_FP32, unit, unit.padded, sizes.reduced)
        self._shards.take_shard(unit, unit.padded)
        self._shards.reduce_scatter(unit, unit.padded)
        self._shards.all_reduce(unit, unit.padded)
        self._shards.free_buffer(IN_FP32, unit)
        self._shards.free_flat_gradient(FLAT, unit)

    def _all_reduce(self, unit: Unit) -> None:
        """Keep the full gradient. A bf16 gradient is cast first, and those of later micro-batches are added to it."""
        sizes = self._shards.sizes
        if sizes.gathered < sizes.reduced:
            if not self._shards.has_shard(unit):
                self._shards.take_shard(unit, unit.padded)
            self._shards.free_flat_gradient(FLAT, unit)
        self._shards.all_reduce(unit, unit.padded)
