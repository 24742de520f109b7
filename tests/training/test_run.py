"""Several trainings in one launch; that one trains rightly is tested with the strategies."""

from dataclasses import replace

import pytest

from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training import run
from fsdp_helpers.training.run import train, train_each
from fsdp_helpers.training.torchrun import Place

FEW_STEPS = TrainConfig(strategy="fsdp", global_batch_size=8, max_steps=3, train_images=24, test_images=8)


@pytest.mark.parametrize("rank, local_rank, prepares", [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_each_machine_prepares_its_data_once(rank, local_rank, prepares, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "prepare_run_data", asked.append)
    place = Place(rank=rank, world_size=4, local_rank=local_rank, local_world_size=2)
    assert run._prepare_together(place, FEW_STEPS, None) is None
    assert asked == [FEW_STEPS] * prepares


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


def test_an_export_that_cannot_be_written_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fsdp_helpers.ranks.launch.Processes", lambda *args, **kwargs: pytest.fail("a rank was started")
    )
    (tmp_path / "file").write_text("not a folder")
    config = TrainConfig(model="llama", strategy="local", export=str(tmp_path / "file" / "model"))
    message = f"the exported model can't be written to {config.export}: {tmp_path / 'file'} isn't a writable folder"
    with pytest.raises(CheckpointError, match=message):
        train(config, device="cpu", progress=False)
    with pytest.raises(CheckpointError, match=message):
        train_each(config, {"one": {}}, world_size=1, device="cpu", progress=False)
    # Root may write anywhere but on a read-only file system, so the answer of one is played here.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=f"{tmp_path} isn't a writable folder"):
        train(replace(config, export=str(tmp_path / "new" / "model")), device="cpu", progress=False)
