"""Several calls of a worker in one launch."""

import gc
import weakref

from torch import nn

from fsdp_helpers.ranks.in_turn import in_turn


def test_the_model_of_one_call_is_gone_when_the_next_begins():
    """Else its bytes would be freed in the middle of what the next call counts."""
    models = []

    def worker(rank, world_size, name):
        still_there = [model() for model in models if model() is not None]
        model = nn.Linear(1, 1)
        model.itself = [model]  # a cycle, as a sharded model has them
        models.append(weakref.ref(model))
        return rank, world_size, name, still_there

    gc.disable()  # or Python might do it by itself, now and then
    try:
        found = in_turn(0, 2, worker, [("first",), ("second",)])
    finally:
        gc.enable()
    assert found == [(0, 2, "first", []), (0, 2, "second", [])]
