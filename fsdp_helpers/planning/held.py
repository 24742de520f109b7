"""Bytes one rank holds between two steps, exactly: its own shards, without padding. No torch.

Shards have different sizes: FSDP2 splits 10 rows over 4 ranks into 3, 3, 3 and 1, and FSDP1 splits its flat tensor into
equal shards, even in the middle of a parameter. On average, a rank holds what `planning.state` says.
"""

from collections.abc import Collection, Sequence
from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.optimizers import named_optimizer
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.state import FP32_BYTES, num_shards
from fsdp_helpers.planning.traffic import ALIGNED_VALUES
from fsdp_helpers.planning.walk.units import cut
from fsdp_helpers.records import StateBytes


def own_state(
    profile: StepProfile,
    config: TrainConfig,
    world_size: int,
    units: Sequence[str] = (),
    rank: int = 0,
    replicas: int | None = None,
    *,
    optimizer: str = "adam",
    value_bytes: int = FP32_BYTES,
) -> StateBytes:
    """Return what `rank` holds: all parameters or its shards, and gradients and moments of the trained ones."""
    shards = num_shards(config.sharding, world_size) if replicas is None else world_size // replicas
    values = own_values(profile, config, shards, units, rank)
    trained = own_values(profile, config, shards, units, rank, counted=profile.trained)
    return StateBytes(
        parameter_bytes=value_bytes * values,
        gradient_bytes=value_bytes * trained,
        optimizer_bytes=named_optimizer(optimizer).state_bytes(trained, value_bytes),
    )


def own_values(
    profile: StepProfile,
    config: TrainConfig,
    shards: int,
    units: Sequence[str],
    rank: int,
    counted: Collection[str] | None = None,
) -> int:
    """Return the number of values on `rank`, one of `shards` that share a copy of the model: of all parameters, or of some."""
    counted = profile.shapes if counted is None else counted
    if not config.is_sharded or shards == 1:
        return sum(prod(profile.shapes[name]) for name in counted)
    place = rank % shards
    if config.api == "fsdp2":
        shapes = [profile.shapes[name] for name in counted]
        return sum(own_rows(shape[0], shards, place) * prod(shape[1:]) for shape in shapes)
    return sum(
        values_between(
            [profile.shapes[name] for name in unit.parameters],
            place * unit.padded // shards,
            (place + 1) * unit.padded // shards,
            [name in counted for name in unit.parameters],
        )
        for unit in cut(profile, units, "fsdp1", shards).values()
    )


def own_rows(rows: int, shards: int, place: int) -> int:
    """Return a rank's rows under FSDP2: an equal share, rounded up, until rows run out."""
    share = -(-rows // shards)
    return max(0, min(share, rows - place * share))


def values_between(shapes: Sequence[Sequence[int]], begin: int, end: int, counted: Sequence[bool] | None = None) -> int:
    """Return how many values of these parameters lie between two places of FSDP1's flat tensor."""
    found = at = 0
    for shape, counts in zip(shapes, counted or [True] * len(shapes), strict=True):
        at += -at % ALIGNED_VALUES
        if counts:
            found += max(0, min(end, at + prod(shape)) - max(begin, at))
        at += prod(shape)
    return found
