"""What notebook 06 shows about saving is what the package does: three ways to save, and what is lost without a part."""

from dataclasses import replace

import checkpoint_workers as workers
import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import saving_and_resuming as lessons

P_SHALLOW = 1_199_882


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    settings = {"global_batch_size": 24, "max_steps": 6, "test_images": 12, "dropout": False}
    return TrainConfig(strategy="fsdp", data_dir=str(tmp_path / "no-mnist"), **settings)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-auto-wrap"])
def test_every_way_writes_the_state_once(strategy, config, tmp_path):
    chosen = replace(config, strategy=strategy)
    for records in launch(lessons.save_every_way, chosen, str(tmp_path / "saved"), world_size=2, device="cpu"):
        assert [record.method for record in records] == ["full", "sharded", "asynchronous"]
        for record in records:
            # 12 bytes a parameter, and less than 2 % for descriptions
            assert 12 * P_SHALLOW <= record.disk_bytes < 1.02 * 12 * P_SHALLOW
            assert 0 < record.waiting_s <= record.total_s
        full, sharded, in_background = (record.extra_bytes for record in records)
        if strategy == "ddp":  # nothing to gather, and a copy of everything for the background
            assert full < 1e5 and sharded < 1e5 and in_background == pytest.approx(12 * P_SHALLOW, rel=0.01)
        else:  # the gathered state; nothing; a copy of a half, and of one more tensor meanwhile
            assert full >= 12 * P_SHALLOW and sharded < 1e5
            assert 6 * P_SHALLOW <= in_background < 9 * P_SHALLOW


def test_what_is_lost_shows_in_the_losses(config, tmp_path):
    losses, _ = launch(lessons.resume_without_each, config, str(tmp_path), world_size=2, device="cpu")
    assert list(losses) == [f"lost: {lost}" for lost in ("nothing", "optimizer", "schedule", "data position")]
    whole = losses.pop("lost: nothing")
    assert whole == launch(workers.train_with_schedule, config, world_size=2, device="cpu")[0], (
        "as if nobody stopped it"
    )
    for lost, others in losses.items():
        assert others[:3] == whole[:3]
        # The first loss after the break is that of the same parameters; on other images it is another at once.
        assert (others[3] == whole[3]) == (lost != "lost: data position")
        assert others[4:] != whole[4:]
