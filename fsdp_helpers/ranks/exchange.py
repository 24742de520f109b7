"""Values that ranks exchange: sums, and one value of each rank."""

import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of `values` over all ranks, on every rank; `values` itself if there is only one process."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def gather_over_ranks(value: object) -> list:
    """Return one value per rank, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
