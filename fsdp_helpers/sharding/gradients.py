"""When gradients are reduced across ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Within the block, accumulate gradients on this rank without reducing them.

    The first backward pass after the block reduces the sum. Until then, FSDP holds full gradients instead of shards.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        with model.no_sync():
            yield
    else:
        yield
