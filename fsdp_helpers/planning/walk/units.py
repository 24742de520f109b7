"""The units of a sharded model, and what a rank holds of each: slices always, the rest as it comes and goes.

No torch import.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.traffic import padded_params
from fsdp_helpers.planning.walk.ledger import Ledger, Term

FROM_HOST, FILLED_UP, JOINED = "slice from the host", "gradients, filled up", "gradients, joined"
GPU_BACKEND = "nccl"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    name: str  # of its module
    parameters: tuple[str, ...]
    values: int  # FSDP1: of its flat tensor, in which every parameter begins at an aligned place
    padded: int  # with what fills it up until the ranks divide it

    @property
    def label(self) -> str:
        return self.name or "root"


def cut(profile: StepProfile, names: Sequence[str], api: str, ranks: int) -> dict[str, Unit]:
    """The units of those names and the root, the root last; a parameter belongs to the innermost unit around it.

    A unit may be empty, where units within it took all. Raises ValueError for a name under which the model has no
    parameters.
    """
    found: dict[str, list[str]] = {name: [] for name in sorted({*names} - {ROOT}, key=len, reverse=True)} | {ROOT: []}
    for parameter in profile.shapes:
        found[next(name for name in found if name == ROOT or parameter.startswith(f"{name}."))].append(parameter)
    for name in {*found} - {ROOT}:
        if not any(parameter.startswith(f"{name}.") for parameter in profile.shapes):
            raise ValueError(f"unit {name!r} has no parameters; a unit is the name of a module that has some")
    return {name: _unit(name, parameters, profile, api, ranks) for name, parameters in found.items()}


def _unit(name: str, parameters: list[str], profile: StepProfile, api: str, ranks: int) -> Unit:
    shapes = [profile.shapes[parameter] for parameter in parameters]
    return Unit(
        name=name,
        parameters=tuple(parameters),
        values=padded_params(api, shapes, 1),
        padded=padded_params(api, shapes, ranks),
    )


class Shards:
    """A ledger by units: gathered parameters, whole gradients, buffers and slices, each by its own word.

    `ranks` share one copy of the state, and `replicas` is the number of copies. With `offloads` the slices lie in host
    memory, and each is on the device only while it is sent or added up.
    """

    def __init__(
        self,
        profile: StepProfile,
        config: TrainConfig,
        ranks: int,
        replicas: int,
        units: Sequence[str],
        backend: str,
        ledger: Ledger,
        *,
        offloads: bool = False,
    ) -> None:
        self.units, self.ranks = cut(profile, units, config.api, ranks), ranks
        self._replicas, self._backend, self._ledger, self._offloads = replicas, backend, ledger, offloads
        self._shapes = profile.shapes
        self._values = {name: prod(shape) for name, shape in profile.shapes.items()}
        self._unit_of = {parameter: unit for unit in self.units.values() for parameter in unit.parameters}
        if not offloads:
            all_values = sum(unit.padded for unit in self.units.values())
            slices = {"name": "slices", "values": all_values, "ranks": ranks}
            ledger.hold(ROOT, Term(kind="parameters", **slices))
            ledger.hold(ROOT, Term(kind="optimizer", **slices, value_bytes=2 * FP32_BYTES))

    def is_gathered(self, unit: Unit) -> bool:
        return self._ledger.holds(unit.name, "gathered", unit.label)

    def gather(self, unit: Unit, value_bytes: int) -> None:
        self._ledger.hold(
            unit.name, Term(kind="gathered", name=unit.label, values=unit.padded, value_bytes=value_bytes)
        )

    def free_gathered(self, unit: Unit) -> None:
        self._ledger.free(unit.name, "gathered", unit.label)

    def take_buffer(self, use: str, unit: Unit, values: int, value_bytes: int = FP32_BYTES, ranks: int = 1) -> None:
        term = Term(kind="buffers", name=f"{use}, {unit.label}", values=values, value_bytes=value_bytes, ranks=ranks)
        self._ledger.hold(unit.name, term)

    def has_buffer(self, use: str, unit: Unit) -> bool:
        return self._ledger.holds(unit.name, "buffers", f"{use}, {unit.label}")

    def free_buffer(self, use: str, unit: Unit) -> None:
        self._ledger.free(unit.name, "buffers", f"{use}, {unit.label}")

    def lay_out(self, unit: Unit, value_bytes: int) -> None:
        """FSDP2 lays gradients out with one operation, `_chunk_cat`; on a CPU it makes copies of its own.

        A gradient whose rows the ranks do not divide is filled up in one, and gradients of another precision than that
        of the reduction are joined in another. A GPU's kernel needs neither.
        """
        if self._backend == GPU_BACKEND:
            return
        uneven = sum(prod(padded) for shape, padded in self._rows_filled_up(unit) if padded != shape)
        self.take_buffer(FILLED_UP, unit, uneven, value_bytes)
        if value_bytes < FP32_BYTES:
            self.take_buffer(JOINED, unit, unit.padded, value_bytes)
        self.free_buffer(FILLED_UP, unit)
        self.free_buffer(JOINED, unit)

    def _rows_filled_up(self, unit: Unit) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The shape of each parameter, and the same with the rows that the ranks divide."""
        for name in unit.parameters:
            rows, *rest = self._shapes[name]
            yield (rows, *rest), (-(-rows // self.ranks) * self.ranks, *rest)

    def communicate(self, op: str, unit: Unit, value_bytes: int = FP32_BYTES) -> None:
        """gloo gathers into a tensor of its own, and reduces a copy; both are gone when it is done. NCCL needs none."""
        self._ledger.communicate(op, value_bytes * unit.padded, self.ranks)
        if self._backend == "gloo":
            self.take_buffer("gloo's copy", unit, unit.padded, value_bytes)
            self.free_buffer("gloo's copy", unit)
        if self._offloads and op == "all_gather":
            self.take_buffer(FROM_HOST, unit, unit.padded, value_bytes, self.ranks)
            self.free_buffer(FROM_HOST, unit)

    def all_reduce(self, unit: Unit) -> None:
        """Add the slice of a gradient up over the copies of the state, where there are several.

        Where each rank has a copy of its own, FSDP1's flat gradient is filled up until all ranks divide it.
        """
        values = unit.padded // self.ranks if self.ranks > 1 else -(-unit.values // self._replicas) * self._replicas
        self._ledger.communicate("all_reduce", FP32_BYTES * values, self._replicas)

    def take_gradient(self, parameter: str, value_bytes: int) -> None:
        """The whole gradient of one parameter."""
        values, name = self._values[parameter], self._whole(self._unit_of[parameter])
        self._ledger.hold(parameter, Term(kind="gradients", name=name, values=values, value_bytes=value_bytes))

    def waiting(self, unit: Unit) -> list[str]:
        """The parameters whose whole gradients are there."""
        return [name for name in unit.parameters if self._ledger.holds(name, "gradients", self._whole(unit))]

    def is_waiting(self, parameter: str) -> bool:
        return self._ledger.holds(parameter, "gradients", self._whole(self._unit_of[parameter]))

    def free_gradients(self, unit: Unit) -> None:
        for name in self.waiting(unit):
            self._ledger.free(name, "gradients", self._whole(unit))

    def take_flat_gradient(self, name: str, unit: Unit, value_bytes: int) -> None:
        """The whole gradients of a unit in one tensor, filled up as its parameters are, so that ranks divide it."""
        term = Term(kind="gradients", name=f"{name}, {unit.label}", values=unit.padded, value_bytes=value_bytes)
        self._ledger.hold(unit.name, term)

    def free_flat_gradient(self, name: str, unit: Unit) -> None:
        self._ledger.free(unit.name, "gradients", f"{name}, {unit.label}")

    def take_slice(self, unit: Unit) -> None:
        """The slice of a reduced gradient; where there is one already, the new one is added to it and freed."""
        name = "new slice" if self._ledger.holds(unit.name, "gradients", "slices") else "slices"
        self._ledger.hold(unit.name, Term(kind="gradients", name=name, values=unit.padded, ranks=self.ranks))
        self._ledger.free(unit.name, "gradients", name if self._offloads else "new slice")

    @staticmethod
    def _whole(unit: Unit) -> str:
        return f"whole, {unit.label}"
