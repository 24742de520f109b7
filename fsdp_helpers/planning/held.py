"""What one rank keeps between two steps, to the byte: its own slices, without padding. No torch.

Slices are not equally long: with 10 rows over 4 ranks FSDP2 gives them 3, 3, 3 and 1, and FSDP1 cuts its flat tensor
wherever the middle may be. On average a rank keeps what `planning.state` says.
"""

from collections.abc import Sequence
from math import prod

from fsdp_helpers.config import TrainConfig
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
) -> StateBytes:
    """Parameters, gradients and two moments of `rank`: of all of them, or of its slices of them."""
    shards = num_shards(config.sharding, world_size) if replicas is None else world_size // replicas
    values = own_values(profile, config, shards, units, rank)
    return StateBytes(
        parameter_bytes=FP32_BYTES * values,
        gradient_bytes=FP32_BYTES * values,
        optimizer_bytes=2 * FP32_BYTES * values,
    )


def own_values(profile: StepProfile, config: TrainConfig, shards: int, units: Sequence[str], rank: int) -> int:
    """The values of `rank`, one of `shards` that share a copy of the model."""
    if not config.is_sharded or shards == 1:
        return profile.num_params
    place = rank % shards
    if config.api == "fsdp2":
        return sum(own_rows(shape[0], shards, place) * prod(shape[1:]) for shape in profile.shapes.values())
    return sum(
        values_between(
            [profile.shapes[name] for name in unit.parameters],
            place * unit.padded // shards,
            (place + 1) * unit.padded // shards,
        )
        for unit in cut(profile, units, "fsdp1", shards).values()
    )


def own_rows(rows: int, shards: int, place: int) -> int:
    """FSDP2 gives every rank the rows of an equal share, rounded up, as long as there are some."""
    share = -(-rows // shards)
    return max(0, min(share, rows - place * share))


def values_between(shapes: Sequence[Sequence[int]], begin: int, end: int) -> int:
    """How many values of these parameters lie between two places of FSDP1's flat tensor."""
    found = at = 0
    for shape in shapes:
        at += -at % ALIGNED_VALUES
        found += max(0, min(end, at + prod(shape)) - max(begin, at))
        at += prod(shape)
    return found
