"""How a run is cut into epochs; that it trains rightly is tested with the strategies and with resuming."""

import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training.worker import epochs_to_train


@pytest.mark.parametrize(
    "max_steps, steps_done, expected",
    [
        # two epochs of five steps each: (epoch, first step within it, number of steps)
        (None, 0, [(0, 0, 5), (1, 0, 5)]),
        (100, 0, [(0, 0, 5), (1, 0, 5)]),
        (7, 0, [(0, 0, 5), (1, 0, 2)]),
        (5, 0, [(0, 0, 5)]),
        (1, 0, [(0, 0, 1)]),
        # resumed: what is left of the epoch under way, then the rest
        (None, 3, [(0, 3, 2), (1, 0, 5)]),
        (4, 3, [(0, 3, 1)]),
        (None, 5, [(1, 0, 5)]),
        # nothing left: the epoch of the last step is evaluated once more
        (None, 10, [(1, 5, 0)]),
        (7, 7, [(1, 2, 0)]),
        (5, 5, [(0, 5, 0)]),
        (2, 3, [(0, 3, 0)]),
        (None, 12, [(1, 7, 0)]),  # the checkpoint came from a run of more epochs
    ],
)
def test_epochs_to_train(max_steps, steps_done, expected):
    parts = epochs_to_train(TrainConfig(epochs=2, max_steps=max_steps), steps_per_epoch=5, steps_done=steps_done)
    assert parts == expected
