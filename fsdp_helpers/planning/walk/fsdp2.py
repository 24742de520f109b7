"""A rank of FSDP2: what `fully_shard` gathers, copies, reduces and frees, event by event. No torch.

The order is that of torch 2.15, `_fsdp_param_group.py` and `_fsdp_collectives.py` in
`torch/distributed/fsdp/_fully_shard`.
"""

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import ROOT
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.walk.units import Shards, Unit

GATHER, REDUCE = "all-gather", "reduce-scatter"


class FullyShard:
    """Parameters in slices by rows; a gathered one is copied out of its buffer, a gradient is copied into one."""

    def __init__(self, shards: Shards, config: TrainConfig) -> None:
        self.units, self._shards, self._ranks = shards.units, shards, shards.ranks
        self._value_bytes = 2 if config.precision == "bf16" else FP32_BYTES  # of what is gathered, and its gradient
        self._frees_after_forward = config.reshard_after_forward and config.sharding != "grad-op"
        self._reshards_after_backward = config.reshard_after_backward
        self._forwards: list[Unit] = []  # in the order in which they ended
        self._copied: Unit | None = None  # whose all-gather buffer forward still keeps
        self._sent: Unit | None = None  # whose reduce-scatter buffer backward still keeps

    def begin_part(self, *, reduces: bool, is_last: bool) -> None:
        self._reduces = reduces
        self._frees_after_backward = is_last or self._reshards_after_backward

    def enter_forward(self, name: str) -> None:
        """Gather; the buffer stays until the next unit's is filled."""
        unit = self.units[name]
        if not self._shards.is_gathered(unit):
            self._fill_buffer(unit)
            self._free_copied()
            self._shards.gather(unit, self._value_bytes)
            self._copied = unit

    def leave_forward(self, name: str) -> None:
        unit = self.units[name]
        self._forwards.append(unit)
        if name == ROOT:
            self._free_copied()
        elif self._frees_after_forward:
            self._shards.free_gathered(unit)

    def enter_backward(self, name: str) -> None:
        """Gather, where it is not there, and fill the buffer of the unit that comes next."""
        unit = self.units[name]
        if not self._shards.is_gathered(unit):
            self._fill_buffer(unit)
            self._shards.gather(unit, self._value_bytes)
            self._shards.free_buffer(GATHER, unit)
        before = self._forwards.index(unit) - 1
        if before >= 0 and not self._shards.is_gathered(self._forwards[before]):
            self._fill_buffer(self._forwards[before])

    def gradient(self, name: str) -> None:
        if not self._shards.is_waiting(name):
            self._shards.take_gradient(name, self._value_bytes)

    def leave_backward(self, name: str) -> None:
        """Free the parameters; lay the gradients out for sending, free them, and take a slice of the sum."""
        unit = self.units[name]
        if self._frees_after_backward:
            self._shards.free_gathered(unit)
        if not self._reduces:
            for parameter in self._shards.waiting(unit):
                self._shards.take_gradient(parameter, FP32_BYTES)  # what waits for the next part waits in fp32
        elif self._shards.waiting(unit):
            self._free_sent()
            self._shards.take_buffer(REDUCE, unit, unit.padded)
            self._shards.lay_out(unit, self._value_bytes)
            self._sent = unit
            self._shards.free_gradients(unit)
            self._shards.take_slice(unit)
            if self._ranks > 1:
                self._shards.communicate("reduce_scatter", unit)
            self._shards.all_reduce(unit)

    def end_backward(self) -> None:
        """The root comes last, with any unit whose input needs no gradient; then the last buffer is freed."""
        for name in reversed(self.units):
            self.leave_backward(name)
        self._free_sent()
        self._forwards.clear()

    def _fill_buffer(self, unit: Unit) -> None:
        if self._ranks > 1 and not self._shards.has_buffer(
            GATHER, unit
        ):  # a rank on its own copies straight from its parameters
            self._shards.take_buffer(GATHER, unit, unit.padded, self._value_bytes)
            self._shards.communicate("all_gather", unit, self._value_bytes)

    def _free_copied(self) -> None:
        if self._copied is not None:
            self._shards.free_buffer(GATHER, self._copied)
        self._copied = None

    def _free_sent(self) -> None:
        if self._sent is not None:
            self._shards.free_buffer(REDUCE, self._sent)
        self._sent = None
