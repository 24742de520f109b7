"""Split a sharded model into units, and track a rank's bytes for each: shards always, everything else temporarily.

No torch import.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from fsdp_helpers.planning.optimizers import Optimizer
from fsdp_helpers.planning.precisions import ValueBytes
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.planning.streams import AT_END, AT_START, COMMUNICATION, COPIES, FROM_HOST, TO_HOST, Task
from fsdp_helpers.planning.traffic import padded_params
from fsdp_helpers.planning.walk.ledger import Ledger, Term

SHARD, LAID_OUT = "shard from the host", "gradients, laid out"
GPU_BACKEND = "nccl"
COPY_OF_GLOO = "gloo's copy"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are unsharded together, and whose gradients are reduced together."""

    name: str  # the name of its module
    parameters: tuple[str, ...]
    padded: int  # the number of values, with the rows of each parameter padded to equal shards

    @property
    def label(self) -> str:
        return self.name or "root"


def num_shards(sharding: str, world_size: int) -> int:
    """Return how many ranks share a copy of the state: half with "hybrid", and all otherwise."""
    return world_size // 2 if sharding == "hybrid" else world_size


def make_units(profile: StepProfile, names: Sequence[str], ranks: int) -> dict[str, Unit]:
    """Return the root and the named units; a parameter belongs to the innermost unit that contains it.

    A unit is empty if all its parameters belong to units inside it. Raises ValueError for a unit that isn't a module
    with parameters, for tied parameters in different units, and for a zero-dimensional (scalar) parameter, which FSDP
    can't shard.
    """
    wanted = dict.fromkeys(name for name in names if name != ROOT)
    found: dict[str, list[str]] = {name: [] for name in (ROOT, *wanted)}
    for parameter, shape in profile.shapes.items():
        if not shape:
            raise ValueError(
                f"{parameter!r} is a zero-dimensional parameter, which FSDP can't shard; give it the shape (1,)"
            )
        found[_innermost(parameter, wanted)].append(parameter)
    _check_tied(profile, wanted)
    modules = {around for parameter in profile.shapes for around in _around(parameter)}
    for name in wanted:
        if name not in modules:
            raise ValueError(f"unit {name!r} has no parameters; name a module that has parameters")
    return {
        name: Unit(
            name=name,
            parameters=tuple(parameters),
            padded=padded_params([profile.shapes[parameter] for parameter in parameters], ranks),
        )
        for name, parameters in found.items()
    }


def _innermost(parameter: str, units: Collection[str]) -> str:
    """Return the name of the innermost unit in `units` that contains `parameter`, or the root's name."""
    return next((around for around in _around(parameter) if around in units), ROOT)


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a parameter, innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def _check_tied(profile: StepProfile, units: Collection[str]) -> None:
    for other, name in profile.tied.items():
        one, two = _innermost(name, units), _innermost(other, units)
        if one != two:
            wrong = two or one
            raise ValueError(
                f"unit {wrong!r}: {other!r} is tied to {name!r}, and tied parameters have to be in the same unit; "
                "leave both in the root"
            )


class Shards:
    """A rank's memory by unit, recorded in a ledger: unsharded parameters, full gradients, buffers and shards.

    `ranks` is the number of ranks that share a copy of the state, and `replicas` the number of copies. With `offloads`,
    shards are in host memory, and each is on the device only while it's sent or accumulated.
    """

    def __init__(
        self,
        profile: StepProfile,
        ranks: int,
        replicas: int,
        units: Sequence[str],
        backend: str,
        ledger: Ledger,
        sizes: ValueBytes,
        optimizer: Optimizer,
        *,
        offloads: bool = False,
    ) -> None:
        self.units = make_units(profile, units, ranks)
        self.ranks, self.sizes = ranks, sizes
        self._replicas, self._backend, self._ledger = replicas, backend, ledger
        self._offloads, self._optimizer = offloads, optimizer
        self._shapes, self._trained = profile.shapes, profile.trained
        self._values = {name: prod(shape) for name, shape in profile.shapes.items()}
        self._unit_of = {parameter: unit for unit in self.units.values() for parameter in unit.parameters}
        if profile.buffer_bytes:
            ledger.hold(ROOT, Term(kind="parameters", name="buffers", values=profile.buffer_bytes, value_bytes=1))
        if not offloads:
            all_values = sum(unit.padded for unit in self.units.values())
            shards = {"values": all_values, "value_bytes": sizes.kept, "ranks": ranks}
            ledger.hold(ROOT, Term(kind="parameters", name="shards", **shards))
            for name, values, value_bytes in optimizer.state_terms(self._trained_padded(), sizes.kept):
                state = {"values": values, "value_bytes": value_bytes, "ranks": ranks}
                ledger.hold(ROOT, Term(kind="optimizer", name=f"shards of {name}", **state))

    def _trained_padded(self) -> int:
        """Return the number of values in all trained shards, padding included."""
        return padded_params(list(self._trained.values()), self.ranks)

    def update(self) -> None:
        """Hold the optimizer step's temporaries, on top of all shards, then free them."""
        if self._offloads:
            return
        largest = max((padded_params([shape], self.ranks) for shape in self._trained.values()), default=0)
        values = self._optimizer.in_flight_values(self._trained_padded(), largest)
        size = {"values": values, "value_bytes": self.sizes.kept, "ranks": self.ranks}
        self._ledger.hold(ROOT, Term(kind="optimizer", name="in flight", **size))
        self._ledger.free(ROOT, "optimizer", "in flight")

    def compute(self, phase: str, unit: Unit) -> None:
        self._ledger.compute(phase, unit.name)

    def is_gathered(self, unit: Unit) -> bool:
        return self._ledger.holds(unit.name, "gathered", unit.label)

    def gather(self, unit: Unit) -> None:
        size = {"values": unit.padded, "value_bytes": self.sizes.gathered}
        self._ledger.hold(unit.name, Term(kind="gathered", name=unit.label, **size))
        if self.ranks == 1 and unit.parameters:  # torch copies in the compute stream, so nothing hides it
            self._copy(FROM_HOST, unit, unit.padded, issued=AT_END)

    def free_gathered(self, unit: Unit) -> None:
        self._ledger.free(unit.name, "gathered", unit.label)

    def take_buffer(self, use: str, unit: Unit, values: int, value_bytes: int, ranks: int = 1) -> None:
        term = Term(kind="buffers", name=f"{use}, {unit.label}", values=values, value_bytes=value_bytes, ranks=ranks)
        self._ledger.hold(unit.name, term)

    def has_buffer(self, use: str, unit: Unit) -> bool:
        return self._ledger.holds(unit.name, "buffers", f"{use}, {unit.label}")

    def free_buffer(self, use: str, unit: Unit) -> None:
        self._ledger.free(unit.name, "buffers", f"{use}, {unit.label}")

    def reduced_values(self, unit: Unit) -> int:
        """Return how many values a unit reduces: the padded rows of its parameters that have gradients."""
        return padded_params([self._shapes[name] for name in self.waiting(unit)], self.ranks)

    def lay_out(self, unit: Unit) -> None:
        """Lay out gradients for the reduction as FSDP2 does, with `_chunk_cat`, which makes extra copies on a CPU.

        Gradients whose rows don't split evenly across the ranks are all copied together, to pad them. Gradients whose
        precision isn't the reduction precision are laid out one by one, each through another copy. The GPU kernel
        needs neither copy.
        """
        if self._backend == GPU_BACKEND:
            return
        rows = list(self._rows_filled_up(unit))
        values = sum(prod(padded) for shape, padded in rows if padded != shape)
        if self.sizes.gathered < self.sizes.reduced:
            values += max((prod(padded) for _, padded in rows), default=0)
        self.take_buffer(LAID_OUT, unit, values, self.sizes.gathered)
        self.free_buffer(LAID_OUT, unit)

    def _rows_filled_up(self, unit: Unit) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield two shapes for each parameter that has a gradient: the original, and one padded to equal shards."""
        for name in self.waiting(unit):
            rows, *rest = self._shapes[name]
            yield (rows, *rest), (-(-rows // self.ranks) * self.ranks, *rest)

    def _copy(self, op: str, unit: Unit, values: int, issued: str) -> None:
        """Add a copy of a shard from or to the host, in the precision of the parameters, if shards are offloaded."""
        if self._offloads:
            queue, size = COPIES if op == TO_HOST else COMMUNICATION, self.sizes.kept * (values // self.ranks)
            self._ledger.tasks.append(Task(queue=queue, op=op, unit=unit.name, amount=size, issued=issued))

    def all_gather(self, unit: Unit) -> None:
        self._copy(FROM_HOST, unit, unit.padded, issued=AT_START)
        self._communicate("all_gather", unit, unit.padded, self.sizes.gathered)
        if self._offloads:
            self.take_buffer(SHARD, unit, unit.padded, self.sizes.gathered, self.ranks)
            self.free_buffer(SHARD, unit)

    def reduce_scatter(self, unit: Unit, values: int) -> None:
        self._communicate("reduce_scatter", unit, values, self.sizes.reduced)

    def _communicate(self, op: str, unit: Unit, values: int, value_bytes: int) -> None:
        """Add a collective. While it runs, hold gloo's copy of its output or of the values to reduce; NCCL doesn't copy."""
        self._ledger.communicate(op, value_bytes * values, self.ranks, unit.name, late=op != "all_gather")
        if self._backend == "gloo":
            self.take_buffer(COPY_OF_GLOO, unit, values, value_bytes)
            self.free_buffer(COPY_OF_GLOO, unit)

    def all_reduce(self, unit: Unit, values: int) -> None:
        """Sum a gradient shard across all copies of the state, if there are several."""
        full_bytes = self.sizes.reduced * (values // self.ranks)
        self._ledger.communicate("all_reduce", full_bytes, self._replicas, unit.name, late=True, between_copies=True)
        self._copy(TO_HOST, unit, values, issued=AT_END)

    def take_gradient(self, parameter: str, value_bytes: int) -> None:
        """Hold one parameter's full gradient."""
        values, name = self._values[parameter], self._full(self._unit_of[parameter])
        self._ledger.hold(parameter, Term(kind="gradients", name=name, values=values, value_bytes=value_bytes))

    def waiting(self, unit: Unit) -> list[str]:
        """Return the names of the unit's parameters whose full gradients are held."""
        return [name for name in unit.parameters if self._ledger.holds(name, "gradients", self._full(unit))]

    def is_waiting(self, parameter: str) -> bool:
        return self._ledger.holds(parameter, "gradients", self._full(self._unit_of[parameter]))

    def free_gradients(self, unit: Unit) -> None:
        for name in self.waiting(unit):
            self._ledger.free(name, "gradients", self._full(unit))

    def has_shard(self, unit: Unit) -> bool:
        """Return True if the unit already has a shard of its reduced gradient."""
        return self._ledger.holds(unit.name, "gradients", "shards")

    def take_shard(self, unit: Unit, values: int) -> None:
        """Hold a shard of the reduced gradient; if there's one already, add the new shard to it, then free the new one.

        The reduction returns the shard in its own precision; the shard is then cast to the parameters' precision.
        """
        name = "new shard" if self.has_shard(unit) else "shards"
        size = {"values": values, "value_bytes": self.sizes.kept, "ranks": self.ranks}
        self._ledger.hold(unit.name, Term(kind="gradients", name=name, **size))
        self._ledger.free(unit.name, "gradients", name if self._offloads else "new shard")

    @staticmethod
    def _full(unit: Unit) -> str:
        return f"full, {unit.label}"
