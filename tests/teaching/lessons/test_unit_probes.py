"""What the rank functions about units find; each number is counted by hand."""

import pytest
from workers_for_tests import call_each

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.copies import TO_DEVICE, TO_HOST
from fsdp_helpers.models.series import VisionTransformer
from fsdp_helpers.planning.traffic import padded_params, step_copied_bytes
from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.sharding.wrapping import choose_units, size_policy
from fsdp_helpers.teaching.figures import plots
from fsdp_helpers.teaching.figures.timelines import unit_copies
from fsdp_helpers.teaching.lessons import unit_probes

BLOCKS = [f"blocks.{number}" for number in range(4)]
BLOCK_BYTES, ROOT_BYTES = 4 * 49_984, 4 * 5_002  # of the small transformer


def on_ranks(world_size: int, worker, *args) -> list:
    return launch(worker, *args, world_size=world_size, device="cpu", timeout_s=240, progress=False)


def test_what_is_kept_between_forward_and_backward():
    whole = 4 * BLOCK_BYTES
    for freed, halved, kept in on_ranks(4, unit_probes.between_forward_and_backward, (True, 2, False)):
        # a ring of n ranks: each sends (n - 1) / n of what is gathered
        assert freed == {"kept bytes": whole // 4, "gathers in backward": 4, "sent bytes": whole * 3 // 4}
        assert halved == {"kept bytes": whole // 2, "gathers in backward": 4, "sent bytes": whole // 2}
        assert kept == {"kept bytes": whole, "gathers in backward": 0, "sent bytes": 0}


def test_a_change_after_an_evaluation_is_lost_unless_the_root_is_resharded_first():
    calls = [(unit_probes.doubled_after_evaluation, reshard_first) for reshard_first in (False, True)]
    for found in on_ranks(2, call_each, calls):
        for reshard_first, seen in zip((False, True), found, strict=True):
            evaluated, doubled, later = seen.values()
            assert doubled == 2 * evaluated, "one linear layer: twice the parameters, twice the output"
            assert later == (doubled if reshard_first else evaluated)


def test_copies_that_start_apart_stay_apart():
    for apart, alike in on_ranks(4, call_each, [(unit_probes.copies_apart, are_apart) for are_apart in (True, False)]):
        # The copies' gradients are averaged, so both take the same steps (rounding aside).
        assert apart["at the start"] > 0.1 and apart["after 5 steps"] == pytest.approx(apart["at the start"], rel=1e-4)
        assert set(alike.values()) == {0.0}


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
    step, copies = on_ranks(2, unit_probes.offloaded_step, config)[0]
    model = VisionTransformer()
    units = choose_units(model, size_policy(config.min_num_params))
    assert units == BLOCKS
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    inside = [[shape for name, shape in shapes.items() if name.startswith(f"{unit}.")] for unit in units]
    root = [shape for name, shape in shapes.items() if not name.startswith("blocks.")]
    predicted = step_copied_bytes([padded_params("fsdp2", group, 2) for group in (root, *inside)], 2)
    assert predicted == tuple(sum(copy.bytes for copy in copies if copy.way == way) for way in (TO_DEVICE, TO_HOST))
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
