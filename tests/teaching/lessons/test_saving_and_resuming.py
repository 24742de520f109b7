"""What notebook 06 shows about saving is what the package does, and each accident is one."""

import os
from dataclasses import replace

import checkpoint_workers as workers
import pytest
import torch

from fsdp_helpers.checkpointing.folder import find_steps
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import RankError, launch
from fsdp_helpers.teaching.lessons import saving_and_resuming as lessons
from fsdp_helpers.training.worker import train_worker

P_SHALLOW = 1_199_882


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    settings = {"global_batch_size": 24, "max_steps": 6, "test_images": 12, "dropout": False}
    return TrainConfig(strategy="fsdp", data_dir=str(tmp_path_factory.mktemp("no-mnist")), **settings)


def on_two_ranks(calls: dict) -> dict:
    """Run several lessons: by name, what each rank returned."""
    return {name: tuple(launch(*call, world_size=2, device="cpu")) for name, call in calls.items()}


LOST = ("nothing", "optimizer", "schedule", "data position")
WAYS = [("ddp", "fsdp2"), ("fsdp-auto-wrap", "fsdp2")]


@pytest.fixture(scope="module")
def found(config, tmp_path_factory) -> dict:
    """By name, what the lessons return that end by themselves."""
    folder = tmp_path_factory.mktemp("saved")
    calls = {
        way: (
            lessons.save_every_way,
            replace(config, strategy=way[0], api=way[1]),
            str(tmp_path_factory.mktemp(way[0])),
        )
        for way in WAYS
    }
    calls["lost"] = (lessons.resume_without_each, config, str(folder))
    calls["undisturbed"] = (workers.train_with_schedule, config)
    for way in ("package", "lesson"):
        calls[f"late, {way}"] = (workers.go_on_with_a_late_head, str(folder / f"late-{way}"), way)
    calls["planted"] = (workers.save_over_planted_files, str(folder / "planted"))
    return on_two_ranks(calls)


@pytest.mark.parametrize("strategy, api", WAYS)
def test_every_way_writes_the_state_once(strategy, api, found):
    check_ways(strategy, api, found[strategy, api])


@pytest.mark.long
def test_every_way_of_fsdp1_writes_the_state_once(config, tmp_path):
    chosen = replace(config, strategy="fsdp-auto-wrap", api="fsdp1")
    check_ways(
        "fsdp-auto-wrap", "fsdp1", launch(lessons.save_every_way, chosen, str(tmp_path), world_size=2, device="cpu")
    )


def check_ways(strategy: str, api: str, of_each_rank: list) -> None:
    for records in of_each_rank:
        assert [record.way for record in records] == ["full", "sharded", "asynchronous"]
        for record in records:
            # 12 bytes a parameter, and less than 2 % for descriptions
            assert 12 * P_SHALLOW <= record.disk_bytes < 1.02 * 12 * P_SHALLOW
            assert 0 < record.waiting_s <= record.total_s
        full, sharded, in_background = (record.extra_bytes for record in records)
        if strategy == "ddp":  # nothing to gather, and a copy of everything for the background
            assert full < 1e5 and sharded < 1e5 and in_background == pytest.approx(12 * P_SHALLOW, rel=0.01)
        elif api == "fsdp2":  # the gathered state; nothing; a copy of a half, and of one more tensor meanwhile
            assert full >= 12 * P_SHALLOW and sharded < 1e5
            assert 6 * P_SHALLOW <= in_background < 9 * P_SHALLOW


def test_what_is_lost_shows_in_the_losses(found):
    losses = dict(found["lost"][0])
    assert list(losses) == [f"lost: {lost}" for lost in LOST]
    whole = losses.pop("lost: nothing")
    for lost, others in losses.items():
        assert others[:3] == whole[:3]
        # The first loss after the break is that of the same parameters; on other images it is another at once.
        assert (others[3] == whole[3]) == (lost != "lost: data position")
        assert others[4:] != whole[4:]


def test_nothing_lost_is_nothing_lost(found):
    """Resumed with everything, the schedule included, it is the run that nobody stopped."""
    assert [losses["lost: nothing"] for losses in found["lost"]] == list(found["undisturbed"])


def test_killed_while_writing(config, tmp_path):
    risky = replace(config, model="simple", checkpoint_dir=str(tmp_path), checkpoint_every=2)
    with pytest.raises(RankError, match="rank 0 of 2 failed: the process was ended by SIGKILL"):
        launch(lessons.train_and_be_killed, risky, 4, world_size=2, device="cpu")
    assert find_steps(tmp_path) == [2]
    assert ".writing-step-00000004" in os.listdir(tmp_path)
    resumed = launch(train_worker, replace(risky, resume=True), world_size=2, device="cpu")[0]
    assert (resumed.first_step, find_steps(tmp_path)) == (2, [2, 4, 6])


@pytest.mark.skipif(torch.__version__ < "2.15", reason="said of torch 2.15 and newer")
def test_fsdp1_on_the_cpu_gathers_one_moment_twice(config):
    answers = launch(workers.gather_by_torch, replace(config, api="fsdp1"), world_size=2, device="cpu")
    assert answers == [False, True]


@pytest.mark.parametrize("way", ["package", "lesson"])
def test_a_parameter_without_a_gradient_so_far_has_no_moments_after_the_load_either(way, found):
    """Of four parameters two have moments. With zeros that count as steps, the losses would leave the right ones."""
    for differs, before, after in found[f"late, {way}"]:
        assert (differs, before, after) == (0.0, 2, 2)


def test_what_a_killed_run_left_is_not_in_the_next_checkpoint(found):
    for files in found["planted"]:
        assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint.json", "state.pt"]
