"""Calculate exactly how many bytes a rank holds between steps: its own shards, without padding. No torch import.

Ranks hold different amounts: FSDP2 splits 10 rows across 4 ranks into 3, 3, 3 and 1.
"""

from collections.abc import Collection
from math import prod

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning.optimizers import named_optimizer
from fsdp_helpers.planning.precisions import PRECISIONS
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.walk.units import num_shards
from fsdp_helpers.records import StateBytes


def own_state(
    profile: StepProfile,
    config: TrainConfig,
    world_size: int,
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
    where = (profile, config, shards, rank)
    values, trained = own_values(*where, profile.shapes), own_values(*where, profile.trained)
    return StateBytes(
        parameter_bytes=sizes.kept * values,
        gradient_bytes=sizes.kept * trained,
        optimizer_bytes=named_optimizer(optimizer).state_bytes(trained, sizes.kept),
    )


def own_values(
    profile: StepProfile,
    config: TrainConfig,
    shards: int,
    rank: int,
    counted: Collection[str],
) -> int:
    """Return how many values `rank` holds of the `counted` parameters if `shards` ranks split a copy."""
    if not config.is_sharded or shards == 1:
        return sum(prod(profile.shapes[name]) for name in counted)
    place = rank % shards
    shapes = [profile.shapes[name] for name in counted]
    return sum(rows_of_shard(shape[0], shards, place) * prod(shape[1:]) for shape in shapes)


def rows_of_shard(rows: int, shards: int, shard: int) -> int:
    """Return how many rows a rank gets under FSDP2: an equal share, rounded up, until rows run out."""
    share = -(-rows // shards)
    return max(0, min(share, rows - shard * share))
