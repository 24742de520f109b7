"""Calculate exactly how many bytes a rank holds between steps: its own shards, without padding. No torch import.

Ranks hold different amounts. FSDP2 splits 10 rows across 4 ranks into 3, 3, 3 and 1. FSDP1 splits its flat tensor into
equal shards, but a shard can end in the middle of a parameter and can contain padding.
"""

from collections.abc import Collection, Sequence
from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.optimizers import named_optimizer
from fsdp_helpers.planning.precisions import FP32_BYTES, PRECISIONS
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.traffic import ALIGNED_BYTES
from fsdp_helpers.planning.walk.units import cut, num_shards
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
    precision: str | None = None,
) -> StateBytes:
    """Return the state that `rank` holds: full or sharded parameters, plus gradients and moments of the trained ones.

    `precision` defaults to `config.precision`, which allows fewer choices than the planner does.
    """
    sizes = PRECISIONS[precision or config.precision]
    shards = num_shards(config.sharding, world_size) if replicas is None else world_size // replicas
    where = (profile, config, shards, units, rank, sizes.gathered)
    values, trained = own_values(*where), own_values(*where, counted=profile.trained)
    return StateBytes(
        parameter_bytes=sizes.kept * values,
        gradient_bytes=sizes.kept * trained,
        optimizer_bytes=named_optimizer(optimizer).state_bytes(trained, sizes.kept),
    )


def own_values(
    profile: StepProfile,
    config: TrainConfig,
    shards: int,
    units: Sequence[str],
    rank: int,
    value_bytes: int = FP32_BYTES,
    counted: Collection[str] | None = None,
) -> int:
    """Return how many values `rank` holds of the `counted` parameters (default: all) if `shards` ranks split a copy.

    `value_bytes` is the size of a value in the compute precision.
    """
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
            value_bytes=value_bytes,
        )
        for unit in cut(profile, units, "fsdp1", shards, value_bytes=value_bytes).values()
    )


def own_rows(rows: int, shards: int, place: int) -> int:
    """Return how many rows a rank gets under FSDP2: an equal share, rounded up, until rows run out."""
    share = -(-rows // shards)
    return max(0, min(share, rows - place * share))


def values_between(
    shapes: Sequence[Sequence[int]],
    begin: int,
    end: int,
    counted: Sequence[bool] | None = None,
    *,
    value_bytes: int = FP32_BYTES,
) -> int:
    """Return the number of parameter values between two positions in FSDP1's flat tensor.

    `value_bytes` is the size of a value in the compute precision, in which parameters are aligned.
    """
    found = at = 0
    for shape, counts in zip(shapes, counted or [True] * len(shapes), strict=True):
        at += -at % (ALIGNED_BYTES // value_bytes)
        if counts:
            found += max(0, min(end, at + prod(shape)) - max(begin, at))
        at += prod(shape)
    return found
