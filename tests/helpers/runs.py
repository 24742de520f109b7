"""Runs and records that several tests share."""

from collections.abc import Container, Iterable
from pathlib import Path

import pytest

from fsdp_helpers import __main__ as command_line
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import (
    Collective,
    CollectiveCount,
    EpochRecord,
    MemoryCurve,
    RankRecord,
    RunRecord,
    StepTrace,
)
from fsdp_helpers.training.worker import train_worker

# The keys that scripts read from `--json`, word for word.
OFFLINE = Path(__file__).with_name("offline.py")  # the command line where no mirror answers
FIXTURES = Path(__file__).parents[1] / "fixtures"  # checkpoints and records of earlier versions

RUN_KEYS = {"config", "data_source", "versions", "device", "world_size", "epochs", "first_step", "step_losses", "ranks"}
ALLOWED_EXTRA_KEYS = {"step_seconds", "device_name", "finished"}
EPOCH_KEYS = {
    "epoch",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "test_correct",
    "test_images",
    "train_images",
    "seconds",
    "images_per_s",
}
RANK_KEYS = {
    "rank",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "held_bytes",
    "peak_bytes",
    "num_units",
    "collectives",
}


def mostly_long(cases: Iterable, *, telling: Container[int] = (0,)) -> list:
    """Cases for `parametrize`: those at the positions `telling` always run, the others are the long evidence."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*value, marks=() if position in telling else pytest.mark.long)
        for position, value in enumerate(values)
    ]


def train(strategy: str, world_size: int, **settings):
    config = TrainConfig(strategy=strategy, **settings)
    return launch(train_worker, config, world_size=world_size, device="cpu")


class Runs:
    """Runs of `train_worker`, each made once, however many tests look at it."""

    def __init__(self, **always) -> None:
        self._always = always
        self._records: dict[tuple[int, TrainConfig], RunRecord] = {}

    def __call__(self, strategy: str, api: str = "fsdp2", world_size: int = 2, **settings) -> RunRecord:
        config = TrainConfig(**self._always | {"strategy": strategy, "api": api} | settings)
        if (world_size, config) not in self._records:
            records = launch(train_worker, config, world_size=world_size, device="cpu")
            assert all(record == records[0] for record in records)  # every rank reports the same
            self._records[world_size, config] = records[0]
        return self._records[world_size, config]


def main_in_process(*arguments) -> int:
    try:
        return command_line.main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse leaves this way
        return end.code


def tiny_record() -> RunRecord:
    curve = MemoryCurve(times_s=(0.0, 0.1, 0.2), allocated_bytes=(16, 40, 16))
    collective = Collective(op="all_reduce", bytes=4, sent_bytes=0, start_s=0.0, end_s=0.1)
    return RunRecord(
        config=TrainConfig(),
        data_source="digits",
        versions={"torch": "0"},
        device="cpu",
        device_name="a CPU",
        finished="2030-01-01T00:00:00+00:00",
        world_size=1,
        epochs=(
            EpochRecord(
                epoch=1,
                train_loss=1.0,
                test_loss=1.0,
                test_accuracy=0.5,
                test_correct=1,
                test_images=2,
                train_images=2,
                seconds=0.5,
                images_per_s=4.0,
            ),
        ),
        first_step=0,
        step_losses=(1.0,),
        step_seconds=(0.5,),
        ranks=(
            RankRecord(
                rank=0,
                parameter_bytes=4,
                gradient_bytes=4,
                optimizer_bytes=8,
                held_bytes=16,
                peak_bytes=40,
                num_units=0,
                collectives=(CollectiveCount(op="all_reduce", count=1, bytes=4, sent_bytes=0),),
            ),
        ),
        traces=(StepTrace(curve=curve, collectives=(collective,)),),
    )


def check_json(content: dict) -> None:
    """`content` has the contract's keys, on every level."""
    assert RUN_KEYS <= set(content) <= RUN_KEYS | ALLOWED_EXTRA_KEYS
    assert all(set(epoch) == EPOCH_KEYS for epoch in content["epochs"])
    assert all(set(rank) == RANK_KEYS for rank in content["ranks"])
    counts = [count for rank in content["ranks"] for count in rank["collectives"]]
    assert all(set(count) == {"op", "count", "bytes", "sent_bytes"} for count in counts)
    assert content["config"].keys() == TrainConfig().__dict__.keys()
