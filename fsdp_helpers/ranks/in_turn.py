"""Several calls of a worker in one launch: what PyTorch prepares in a process, it prepares once for all of them."""

import gc
from collections.abc import Callable, Sequence


def in_turn(rank: int, world_size: int, worker: Callable, calls: Sequence[tuple]) -> list:
    """Run the rank function `worker(rank, world_size, *call)` for each of `calls`, in order; return their results.

    launch(in_turn, my_worker, [(first,), (second,)], world_size=2) takes less time than two launches. The model of one
    call is gone when the next begins, so that bytes counted there are those of a launch of its own.
    """
    results = []
    for call in calls:
        results.append(worker(rank, world_size, *call))
        gc.collect()  # a sharded model is in reference cycles
    return results
