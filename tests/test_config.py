import pickle
from dataclasses import FrozenInstanceError

import pytest

from fsdp_helpers.config import TrainConfig


def test_defaults_are_valid_and_frozen():
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.epochs = 2
    assert pickle.loads(pickle.dumps(config)) == config  # it crosses a process boundary


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model": "huge"}, "unknown model 'huge'; choose one of shallow"),
        ({"strategy": "zero9"}, "unknown strategy 'zero9'; choose one of local, ddp"),
        ({"epochs": 0}, "epochs is 0; it must be a whole number, 1 or more"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"epochs": True}, "epochs is True"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"global_batch_size": -1}, "global_batch_size is -1"),
        ({"train_images": 0}, "train_images is 0"),
        ({"test_images": -5}, "test_images is -5"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_refused_with_the_number_in_the_message(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


def test_local_is_one_process():
    TrainConfig(strategy="local").check_world_size(1)
    with pytest.raises(ValueError, match="one process, world_size is 2"):
        TrainConfig(strategy="local").check_world_size(2)


def test_batch_must_divide():
    config = TrainConfig(strategy="ddp", global_batch_size=256)
    config.check_world_size(2)
    # 256 = 3 x 85 + 1: one image left over; the neighbours that divide are 255 and 258
    with pytest.raises(ValueError, match=r"256 does not divide by world_size 3: 1 image.*use 258 or 255"):
        config.check_world_size(3)
    # 256 < 300: the only neighbour above zero is 300
    with pytest.raises(ValueError, match=r"256 image.*use 300$"):
        config.check_world_size(300)


def test_data_must_fill_one_batch():
    config = TrainConfig(global_batch_size=256, train_images=300)
    config.check_data_size(60_000)  # 300 of them
    with pytest.raises(ValueError, match="255 training images do not fill one global batch of 256"):
        config.check_data_size(255)
    with pytest.raises(ValueError, match="100 training images"):
        TrainConfig(global_batch_size=256, train_images=100).check_data_size(60_000)
