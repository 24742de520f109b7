"""Walk through a step of an FSDP2 rank: what `fully_shard` unshards, copies, reduces and frees. No torch import.

The order of events comes from torch 2.15, `_fsdp_state.py`, `_fsdp_param_group.py` and `_fsdp_collectives.py` in
`torch/distributed/fsdp/_fully_shard`.
"""

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import ROOT
from fsdp_helpers.planning.walk.units import Shards, Unit

GATHER, LAST_GATHER, REDUCE = "all-gather", "all-gather of the last use", "reduce-scatter"
SENT = "shard to be gathered"


class FullyShard:
    """A rank with row-sharded parameters; it copies full parameters from one buffer, and gradients into another."""

    def __init__(self, shards: Shards, config: TrainConfig) -> None:
        # An empty unit does nothing, but an empty root still computes
        self.units = {name: unit for name, unit in shards.units.items() if unit.parameters or name == ROOT}
        self._shards, self._ranks = shards, shards.ranks
        self._frees_after_forward = config.reshard_after_forward and config.sharding != "grad-op"
        self._order: list[Unit] = []  # in the order in which forwards ended; a unit appears once per use
        self._uses: dict[str, list[int]] = {}  # unit -> the positions of its uses in that order
        self._in_backward: set[str] = set()  # units that have entered backward and haven't left it
        self._done: set[str] = set()  # units that have left backward
        self._backward_runs = False
        self._copied: Unit | None = None  # the unit whose all-gather buffer forward still keeps
        # The outermost unit of a forward pass during backward, which torch treats as that pass's root
        self._recomputed: str | None = None
        self._sent: Unit | None = None  # the unit whose reduce-scatter buffer backward still keeps

    def begin_part(self, *, reduces: bool) -> None:
        self._reduces = reduces

    def enter_forward(self, name: str) -> None:
        """Unshard, and keep the buffer until the next buffer is filled. A recomputed unit may already be unsharded."""
        unit = self.units[name]
        if self._backward_runs and name not in self._in_backward and self._recomputed is None:
            self._recomputed = name
        if self._shards.is_gathered(unit) or not unit.parameters:
            return
        if self._copied is unit:  # used twice in a row: its last use's buffer stays until the new one is filled
            self._shards.take_buffer(LAST_GATHER, unit, unit.padded, self._shards.sizes.gathered)
            self._free_copied()
        self._fill_buffer(unit)
        self._shards.free_buffer(LAST_GATHER, unit)
        if name not in self._in_backward:
            self._free_copied()
        self._shards.gather(unit)
        if name in self._in_backward:
            self._shards.free_buffer(GATHER, unit)
        else:
            self._copied = unit

    def leave_forward(self, name: str) -> None:
        """Reshard. A recomputed unit only frees its buffer; it stays unsharded, since its backward pass comes next."""
        if self._backward_runs:
            if name == self._recomputed:
                self._free_copied()
                self._recomputed = None
            return
        unit = self.units[name]
        self._shards.compute("forward", unit)
        if unit.parameters:
            self._uses.setdefault(name, []).append(len(self._order))
            self._order.append(unit)
        if name == ROOT:
            self._free_copied()
        elif self._frees_after_forward:
            self._shards.free_gathered(unit)

    def enter_backward(self, name: str) -> None:
        """Unshard the unit if it's still sharded, and fill the next unit's buffer."""
        self._backward_runs = True
        if name in self._in_backward:
            return
        unit = self.units[name]
        self._in_backward.add(name)
        self._done.discard(name)
        if unit.parameters and not self._shards.is_gathered(unit):
            self._fill_buffer(unit)
            self._shards.gather(unit)
            self._shards.free_buffer(GATHER, unit)
        self._shards.compute("backward", unit)
        place = self._uses[name].pop() if self._uses.get(name) else 0
        if place and not self._shards.is_gathered(self._order[place - 1]):
            self._fill_buffer(self._order[place - 1])

    def gradient(self, name: str) -> None:
        if not self._shards.is_waiting(name):
            self._shards.take_gradient(name, self._shards.sizes.gathered)

    def leave_backward(self, name: str) -> None:
        """Reshard, copy the gradients into a buffer, free them, and keep a shard of their sum over all ranks."""
        unit = self.units[name]
        self._in_backward.discard(name)
        self._done.add(name)
        self._shards.free_gathered(unit)
        if not self._reduces:
            for parameter in self._shards.waiting(unit):
                # Gradients wait for the next micro-batch in the reduction's precision
                self._shards.take_gradient(parameter, self._shards.sizes.reduced)
            return
        self._free_sent()
        if self._shards.waiting(unit):
            self._reduce(unit)

    def update(self) -> None:
        self._shards.update()

    def end_backward(self) -> None:
        """Leave the units still in backward: the root and units whose input needs no gradient. Free all leftovers."""
        for name in self.units:
            if name not in self._done:
                self.leave_backward(name)
        self._free_sent()
        self._free_copied()
        for unit in self.units.values():
            self._shards.free_buffer(GATHER, unit)  # all-gathered for a backward pass that never ran
        self._order.clear()
        self._uses.clear()
        self._done.clear()
        self._backward_runs = False
        self._recomputed = None

    def _reduce(self, unit: Unit) -> None:
        values = self._shards.reduced_values(unit)
        self._shards.take_buffer(REDUCE, unit, values, self._shards.sizes.reduced)
        self._shards.lay_out(unit)
        self._sent = unit
        self._shards.free_gradients(unit)
        self._shards.take_shard(unit, values)
        if self._ranks > 1:
            self._shards.reduce_scatter(unit, values)
        self._shards.all_reduce(unit, values)

    def _fill_buffer(self, unit: Unit) -> None:
        """All-gather into the unit's buffer. If a shard has to be cast first, keep its cast copy until that's done."""
        # A single rank copies straight from its parameters
        if self._ranks == 1 or self._shards.has_buffer(GATHER, unit):
            return
        sizes = self._shards.sizes
        if sizes.gathered < sizes.kept:
            self._shards.take_buffer(SENT, unit, unit.padded, sizes.gathered, self._ranks)
        self._shards.take_buffer(GATHER, unit, unit.padded, sizes.gathered)
        self._shards.all_gather(unit)
        self._shards.free_buffer(SENT, unit)

    def _free_copied(self) -> None:
        if self._copied is not None:
            self._shards.free_buffer(GATHER, self._copied)
        self._copied = None

    def _free_sent(self) -> None:
        if self._sent is not None:
            self._shards.free_buffer(REDUCE, self._sent)
        self._sent = None
