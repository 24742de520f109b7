"""Trace an FSDP2 step: when each unit is unsharded, resharded and reduced, and when gradients are computed.

All times are measured on ranks of one machine, which share a clock. On a GPU, a gradient's time is when its last
kernel was launched; collectives and phases end when the GPU is done.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_helpers.records import Collective, MemoryCurve, Phase, StepTrace, later


@dataclass(frozen=True, kw_only=True)
class TracedUnit:
    """Parameters that are unsharded together, and whose gradients are reduced together."""

    name: str
    full_bytes: int  # the size of the full tensor in its collectives, padding included


@dataclass(frozen=True, kw_only=True)
class GradientMade:
    """A parameter's full gradient, computed from this rank's own images."""

    unit: str
    parameter: str
    bytes: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Stay:
    """An interval in which a unit's parameters are unsharded on one rank."""

    gather: Collective
    freed_s: float


@dataclass(frozen=True, kw_only=True)
class RankUnits:
    """One rank's record of the step; times on all ranks count from the same moment."""

    trace: StepTrace
    zeroed_s: float  # when `zero_grad` has released the old gradients
    gradients: tuple[GradientMade, ...]
    stays: dict[str, tuple[Stay, ...]]  # by unit, in chronological order
    reduces: dict[str, Collective]  # by unit


@dataclass(frozen=True, kw_only=True)
class UnitTrace:
    """One step of an FSDP2 run, on every rank."""

    model: str
    versions: dict[str, str]
    units: tuple[TracedUnit, ...]  # in forward's order; the root is first
    ranks: tuple[RankUnits, ...]

    @property
    def length_s(self) -> float:
        """Return the time at which the last rank finished its step."""
        return max(phase.end_s for rank in self.ranks for phase in rank.trace.curve.phases)

    def save(self, path: str | PathLike) -> None:
        Path(path).write_text(json.dumps(_rounded(asdict(self))) + "\n")


def read_unit_trace(path: str | PathLike) -> UnitTrace:
    """Read a trace written by `UnitTrace.save`."""
    kept = json.loads(Path(path).read_text())
    return UnitTrace(
        model=kept["model"],
        versions=kept["versions"],
        units=tuple(TracedUnit(**unit) for unit in kept["units"]),
        ranks=tuple(_read_rank(rank) for rank in kept["ranks"]),
    )


class UnitHooks:
    """Hooks that record when forward enters and leaves each unit of a sharded model, and when gradients are complete.

    Add them after `fully_shard`, so that FSDP2's own hooks run first: then parameters are already unsharded when these
    hooks are called.
    """

    def __init__(self, model: nn.Module) -> None:
        # Unit -> when forward left it, and whether it was resharded then
        self._left: dict[str, tuple[float, bool]] = {}
        self._gradients: list[GradientMade] = []
        self._zeroed_s = 0.0
        self._watched: set[int] = set()
        self._units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        for name, unit in self._units.items():
            unit.register_forward_pre_hook(self._enter(name))
            unit.register_forward_hook(self._leave(name))

    def begin_step(self) -> None:
        """Forget the previous step. Call this right after `zero_grad`."""
        self._zeroed_s = time.perf_counter()
        self._left, self._gradients = {}, []

    def _enter(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            for parameter_name, parameter in self._own_parameters(name):
                if id(parameter) not in self._watched:  # FSDP2 uses the same full parameter in every step
                    self._watched.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(self._made(name, parameter_name))

        return hook

    def _leave(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: object) -> None:
            is_freed = all(isinstance(parameter, DTensor) for _, parameter in self._own_parameters(name))
            self._left[name or "root"] = (time.perf_counter(), is_freed)

        return hook

    def _made(self, unit: str, parameter_name: str) -> Callable:
        def hook(parameter: nn.Parameter) -> None:
            made = GradientMade(
                unit=unit or "root", parameter=parameter_name, bytes=parameter.grad.nbytes, time_s=time.perf_counter()
            )
            self._gradients.append(made)

        return hook

    def _own_parameters(self, unit: str) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters in this unit that aren't in a nested unit."""
        inner = [name for name in self._units if name != unit and name.startswith(f"{unit}." if unit else "")]
        found = self._units[unit].named_parameters(prefix=unit)
        return [(name, one) for name, one in found if not any(name.startswith(f"{other}.") for other in inner)]

    def seen_with(self, trace: StepTrace) -> RankUnits:
        """Return this rank's last step, with times from the step's start; `trace` must be a trace of that step."""
        reduces = {seen.unit: seen for seen in trace.collectives if seen.op == "reduce_scatter"}
        stays: dict[str, tuple[Stay, ...]] = {}
        for gather in (seen for seen in trace.collectives if seen.op == "all_gather"):
            left_s, is_freed = self._left[gather.unit]
            before = stays.get(gather.unit, ())  # if there is one, the unit was resharded, and is gathered for backward
            freed_s = left_s - trace.began_s if is_freed and not before else reduces[gather.unit].start_s
            stays[gather.unit] = (*before, Stay(gather=gather, freed_s=freed_s))
        return RankUnits(
            trace=trace,
            zeroed_s=self._zeroed_s - trace.began_s,
            gradients=tuple(replace(made, time_s=made.time_s - trace.began_s) for made in self._gradients),
            stays=stays,
            reduces=reduces,
        )


def unit_trace(model: str, versions: dict[str, str], ranks: Sequence[RankUnits]) -> UnitTrace:
    """Return one step on all ranks; times count from when the first rank began.

    Raises ValueError if the ranks unsharded different units or different numbers of bytes.
    """
    sizes = [{name: stays[0].gather.bytes for name, stays in rank.stays.items()} for rank in ranks]
    if any(one != sizes[0] for one in sizes):
        raise ValueError(f"the ranks unsharded different units: {sizes}")
    began_s = min(rank.trace.began_s for rank in ranks)
    units = tuple(TracedUnit(name=name, full_bytes=size) for name, size in sizes[0].items())
    shifted = tuple(later(rank, rank.trace.began_s - began_s) for rank in ranks)
    return UnitTrace(model=model, versions=versions, units=units, ranks=shifted)


def _rounded(value: object) -> object:
    """Return the value with all times rounded to the microsecond; smaller differences are noise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def _read_rank(kept: dict) -> RankUnits:
    curve = kept["trace"]["curve"]
    curve = MemoryCurve(
        times_s=tuple(curve["times_s"]),
        allocated_bytes=tuple(curve["allocated_bytes"]),
        phases=tuple(Phase(**phase) for phase in curve["phases"]),
    )
    collectives = tuple(Collective(**seen) for seen in kept["trace"]["collectives"])
    return RankUnits(
        trace=replace(StepTrace(**kept["trace"]), curve=curve, collectives=collectives),
        zeroed_s=kept["zeroed_s"],
        gradients=tuple(GradientMade(**made) for made in kept["gradients"]),
        stays={
            name: tuple(Stay(gather=Collective(**stay["gather"]), freed_s=stay["freed_s"]) for stay in stays)
            for name, stays in kept["stays"].items()
        },
        reduces={name: Collective(**seen) for name, seen in kept["reduces"].items()},
    )
