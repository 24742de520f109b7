"""A run under torchrun: each machine prepares its data once."""

import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training import run
from fsdp_helpers.training.torchrun import TorchrunRank

SHORT_RUN = TrainConfig(strategy="fsdp", global_batch_size=8, max_steps=3, train_images=24, test_images=8)


@pytest.mark.parametrize("rank, local_rank, prepares", [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_each_machine_prepares_its_data_once(rank, local_rank, prepares, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "prepare_run_data", asked.append)
    place = TorchrunRank(rank=rank, world_size=4, local_rank=local_rank, local_world_size=2)
    assert run._prepare_together(place, SHORT_RUN, None) is None
    assert asked == [SHORT_RUN] * prepares
