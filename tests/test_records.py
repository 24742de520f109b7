import json
from dataclasses import replace

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.records import (
    Collective,
    CollectiveCount,
    EpochRecord,
    MemoryCurve,
    RankRecord,
    RunRecord,
    StateBytes,
    StepTrace,
)

# The keys that scripts read from `--json`, word for word.
RUN_KEYS = {"config", "data_source", "versions", "device", "world_size", "epochs", "first_step", "step_losses", "ranks"}
ALLOWED_EXTRA_KEYS = {"step_seconds", "device_name", "finished", "gradient_norms"}
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


def tiny_record() -> RunRecord:
    curve = MemoryCurve(times_s=(0.0, 0.1, 0.2), allocated_bytes=(16, 40, 16))
    collective = Collective(op="all_reduce", bytes=4, start_s=0.0, end_s=0.1)
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
                collectives=(CollectiveCount(op="all_reduce", count=1, bytes=4),),
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
    assert all(set(count) == {"op", "count", "bytes"} for count in counts)
    assert content["config"].keys() == TrainConfig().__dict__.keys()


def test_to_json_is_the_contract():
    content = json.loads(json.dumps(tiny_record().to_json()))  # plain values only
    check_json(content)
    assert content["ranks"][0]["collectives"] == [{"op": "all_reduce", "count": 1, "bytes": 4}]


def test_a_run_that_had_nothing_left_to_train_is_in_the_contract_too():
    epoch = replace(tiny_record().epochs[0], epoch=3, train_loss=None, train_images=0, images_per_s=None)
    record = replace(tiny_record(), epochs=(epoch,), first_step=7, step_losses=(), step_seconds=())
    content = json.loads(json.dumps(record.to_json()))
    check_json(content)
    assert (content["first_step"], content["step_losses"]) == (7, [])
    assert [content["epochs"][0][name] for name in ("epoch", "train_loss", "images_per_s")] == [3, None, None]


def test_state_total():
    # 4 bytes of parameters + 4 of gradients + 2 x 4 of Adam's moments = 16 bytes a parameter
    assert StateBytes(parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8).total_bytes == 16


def test_held_is_the_end_and_peak_the_highest():
    curve = MemoryCurve(times_s=(0.0, 1.0, 2.0), allocated_bytes=(10, 30, 20))
    assert (curve.held_bytes, curve.peak_bytes) == (20, 30)
