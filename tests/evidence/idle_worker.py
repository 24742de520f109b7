"""A worker that does nothing, in a module that loads nothing: what is measured is the launch."""


def return_rank(rank: int, world_size: int | None = None) -> int:
    return rank
