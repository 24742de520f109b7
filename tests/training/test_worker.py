"""The record of an epoch, hand-worked."""

import pytest
import torch

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training.worker import epoch_record


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
