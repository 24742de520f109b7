"""Several trainings in one launch; that one trains rightly is tested with the strategies."""

from dataclasses import replace

import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training.run import train, train_each

FEW_STEPS = TrainConfig(strategy="fsdp", global_batch_size=8, max_steps=3, train_images=24, test_images=8)


def test_the_second_of_two_trainings_is_that_of_a_launch_of_its_own(digits_dir):
    config = replace(FEW_STEPS, data_dir=str(digits_dir))
    variants = {"DDP": {"strategy": "ddp"}, "FSDP": {}}
    both = train_each(config, variants, world_size=2, device="cpu", progress=False)
    alone = train(config, world_size=2, device="cpu", progress=False)
    assert [record.config.strategy for record in both.values()] == ["ddp", "fsdp"]
    second = both["FSDP"]
    assert (second.step_losses, second.epochs[-1].test_loss) == (alone.step_losses, alone.epochs[-1].test_loss)
    for one, other in zip(second.ranks, alone.ranks, strict=True):
        assert (one.held_bytes, one.peak_bytes, one.collectives) == (
            other.held_bytes,
            other.peak_bytes,
            other.collectives,
        )


def test_what_cannot_work_is_refused_before_a_process_starts(tmp_path):
    with pytest.raises(ValueError, match="resumable: train_each can't save checkpoints"):
        train_each(FEW_STEPS, {"resumable": {"checkpoint_dir": str(tmp_path)}}, world_size=2, device="cpu")
    with pytest.raises(ValueError, match="global_batch_size"):
        train_each(FEW_STEPS, {"odd": {"global_batch_size": 7}}, world_size=2, device="cpu")
