"""What torchrun tells a rank, in its environment."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank of torchrun stands: among all ranks, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def started_by_torchrun() -> bool:
    """True in a process that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def read_place() -> Place:
    """This process's place, from the variables that torchrun sets."""
    return Place(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
