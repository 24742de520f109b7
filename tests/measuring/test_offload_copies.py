"""The trace of offload's copies, by itself and against the arithmetic of a whole step."""

import pytest
import torch
from torch import nn
from workers_for_tests import offloaded_step

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST, OffloadCopy, name_offload_copies, trace_copies
from fsdp_helpers.models.series import VisionTransformer
from fsdp_helpers.planning.traffic import padded_params
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.sharding.wrapping import choose_units, size_policy
from fsdp_helpers.teaching.figures import plots
from fsdp_helpers.teaching.figures.timelines import unit_copies

BLOCKS = [f"blocks.{number}" for number in range(4)]


def test_other_calls_are_not_noted_and_torch_is_left_as_it_was():
    before, model = torch.Tensor.to, nn.Linear(2, 2)
    with trace_copies(model) as copies:
        assert torch.Tensor.to is not before
        torch.ones(2).to(torch.device("cpu"))  # not called by FSDP2
    assert copies == [] and torch.Tensor.to is before
    with pytest.raises(KeyError), trace_copies(model):
        raise KeyError
    assert torch.Tensor.to is before


def test_the_unit_of_a_copy_is_the_innermost_one():
    copy = OffloadCopy(name="body.1.fc.weight", way=TO_HOST, bytes=4, start_s=0.0, was_made=True)
    assert [copy.unit(units) for units in ([], ["body"], ["body", "body.1"], ["body.10"])] == [
        "root",
        "body",
        "body.1",
        "root",
    ]


def test_an_empty_shard_of_a_small_parameter_is_no_copy():
    model, empty = nn.Linear(2, 2), torch.empty(0)
    shard = model.weight.detach()
    assert [copy.name for copy in name_offload_copies(model, [(0.0, shard, shard), (0.1, empty, empty)])] == ["weight"]


def test_the_copies_of_a_step_with_offload(digits_dir):
    config = TrainConfig(
        model="vit",
        strategy="fsdp-offload",
        global_batch_size=8,
        max_steps=2,
        train_images=64,
        test_images=4,
        data_dir=str(digits_dir),
    )
    step, copies = launch(offloaded_step, config, world_size=2, device="cpu", timeout_s=240, progress=False)[0]
    model = VisionTransformer()
    units = choose_units(model, size_policy(config.min_num_params))
    assert units == BLOCKS
    # fp32 on 2 ranks, rows filled up to an even number: the root's shards go to the device once, the others' twice
    shards = dict.fromkeys(["root", *BLOCKS], 0)
    for name, parameter in model.named_parameters():
        unit = next((unit for unit in BLOCKS if name.startswith(f"{unit}.")), "root")
        shards[unit] += 4 * padded_params([parameter.shape], 2) // 2
    to_host = sum(shards.values())
    to_device = 2 * to_host - shards["root"]
    assert [sum(copy.bytes for copy in copies if copy.way == way) for way in (TO_DEVICE, TO_HOST)] == [
        to_device,
        to_host,
    ]
    assert not any(copy.was_made for copy in copies)  # host and device are one memory here
    # Each gather is preceded by its unit's shards, each reduce-scatter followed by its gradients.
    ways = {
        way: [unit for unit, found, _ in unit_copies(copies, units) if found == way] for way in (TO_DEVICE, TO_HOST)
    }
    assert ways[TO_DEVICE] == ["root", *BLOCKS, *reversed(BLOCKS)]
    assert ways[TO_HOST] == [*reversed(BLOCKS), "root"]
    gathers = [seen for seen in step.collectives if seen.op == "all_gather"]
    asked_s = [start_s - step.began_s for _, way, start_s in unit_copies(copies, units) if way == TO_DEVICE]
    assert len(gathers) == len(asked_s)
    assert all(0 < asked < seen.end_s for asked, seen in zip(asked_s, gathers, strict=True))
    fig, ax = plots.plot_copies(step, copies, units)
    assert [text.get_text() for text in ax.texts].count("root") == 2
    assert [label.get_text() for label in ax.get_yticklabels()] == ["collectives", TO_DEVICE, TO_HOST]
