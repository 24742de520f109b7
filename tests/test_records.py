import json
import math
from dataclasses import replace

import pytest
from runs import check_json, tiny_record

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.records import (
    CollectiveCount,
    largest_difference,
)


def test_to_json_is_the_contract():
    content = json.loads(json.dumps(tiny_record().to_json()))  # plain values only
    check_json(content)
    assert content["ranks"][0]["collectives"] == [{"op": "all_reduce", "count": 1, "bytes": 4, "sent_bytes": 0}]


def test_the_largest_difference_of_losses():
    assert largest_difference([1.0, 2.0, 3.0], [1.5, 2.0, 2.75]) == 0.5
    assert math.isnan(largest_difference([1.0, math.nan, 3.0], [1.5, 2.0, 2.75]))  # wherever the NaN is
    record = replace(tiny_record(), step_losses=(1.0, 2.0))
    assert record.largest_difference([1.0, 2.25]) == record.largest_difference(replace(record, step_losses=(0.75, 2.0)))
    for others in ([1.0], []):
        with pytest.raises(ValueError, match=f"2 steps can't be compared with {len(others)}"):
            record.largest_difference(others)


def test_a_run_that_had_nothing_left_to_train_is_in_the_contract_too():
    epoch = replace(tiny_record().epochs[0], epoch=3, train_loss=None, train_images=0, images_per_s=None)
    record = replace(tiny_record(), epochs=(epoch,), first_step=7, step_losses=(), step_seconds=())
    content = json.loads(json.dumps(record.to_json()))
    check_json(content)
    assert (content["first_step"], content["step_losses"]) == (7, [])
    assert [content["epochs"][0][name] for name in ("epoch", "train_loss", "images_per_s")] == [3, None, None]


@pytest.mark.parametrize(
    "first_step, steps, max_steps, why",
    [
        (0, 3, 3, None),
        (0, 3, None, None),
        (2, 1, 3, None),
        (0, 5, 100, "ended after 5 of 100 steps: the images of 1 epoch are used up; raise --epochs"),
        (5, 0, 200, "ended after 5 of 200 steps: the images of 1 epoch are used up"),
        (0, 1, None, None),
        (5, 0, None, "nothing left to train: step 5 was the last one"),
        (5, 0, 5, "nothing left to train: step 5 was the last one; raise --max-steps or --epochs"),
    ],
)
def test_why_a_run_took_no_more_steps(first_step, steps, max_steps, why):
    config = TrainConfig(max_steps=max_steps)
    record = replace(tiny_record(), config=config, first_step=first_step, step_losses=(1.0,) * steps)
    found = record.why_no_more_steps
    assert found is None if why is None else found.startswith(why)


def test_a_rank_adds_up_its_collectives():
    gathers = CollectiveCount(op="all_gather", count=9, bytes=800, sent_bytes=400)
    reduces = CollectiveCount(op="reduce_scatter", count=5, bytes=500, sent_bytes=250)
    rank = replace(tiny_record().ranks[0], collectives=(gathers, reduces))
    assert rank.sent_bytes == 650
    assert (rank.count("all_gather"), rank.count("all_reduce"), rank.count()) == (9, 0, 14)
