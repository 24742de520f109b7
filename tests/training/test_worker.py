"""How a run is cut into epochs, and the record of one; that it trains rightly is tested with the strategies."""

import pytest
import torch
from workers_for_tests import answer_to_each_disagreement, train_with_a_clock_of_its_own

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training.worker import epoch_record, epochs_to_train, load_rank_data


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


def test_an_epoch_hand_worked():
    # 3 steps of 8 images in 0.5 s; of 5 test images 4 are right, and their losses sum to 10
    test_sums = torch.tensor([10.0, 4.0, 5.0], dtype=torch.float64)
    epoch = epoch_record(TrainConfig(global_batch_size=8), 1, [3.0, 2.0, 1.0], 0.5, test_sums)
    assert (epoch.train_images, epoch.images_per_s) == (24, 48.0)  # 24 / 0.5
    assert (epoch.train_loss, epoch.test_loss, epoch.test_accuracy) == (2.0, 2.0, pytest.approx(0.8))
    assert (epoch.test_correct, epoch.test_images) == (4, 5)


def test_an_epoch_with_nothing_left_to_train_has_no_speed():
    epoch = epoch_record(TrainConfig(), 1, [], 0.0, torch.tensor([10.0, 4.0, 5.0]))
    assert (epoch.train_images, epoch.train_loss, epoch.images_per_s) == (0, None, None)


# ---------------------------------------------------------------- ranks that disagree


@pytest.fixture
def tiny(digits_dir) -> TrainConfig:
    return TrainConfig(
        strategy="ddp", max_steps=2, global_batch_size=4, train_images=8, test_images=4, data_dir=str(digits_dir)
    )


def test_a_rank_loads_the_images_that_the_run_asks_for(tiny):
    dataset = load_rank_data(tiny, torch.device("cpu"))
    assert (len(dataset.train), len(dataset.test)) == (8, 4)


def test_every_rank_is_told_where_ranks_disagree(tiny, tmp_path):
    for said in launch(answer_to_each_disagreement, tiny, str(tmp_path), world_size=2, device="cpu", timeout_s=120):
        assert said["data"].startswith("DataError: some ranks find MNIST and others don't; give every machine the same")
        assert said["folder"].startswith("CheckpointError: the ranks don't all see the same files in ")
        assert said["save"] == "CheckpointError: nothing was saved: no space is left for it"
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_lasts_as_long_as_on_the_slowest_rank_and_ranks_draw_their_own_numbers(tiny):
    (seconds, drawn), (seconds_of_other, drawn_by_other) = launch(
        train_with_a_clock_of_its_own, tiny, world_size=2, device="cpu", timeout_s=120
    )
    assert seconds == seconds_of_other == 3.0
    assert drawn != drawn_by_other  # dropout masks, among others
