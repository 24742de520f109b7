"""FSDP by hand with several units is FSDP2: the same losses, the same collectives in the same order, shards held."""

import pytest
import workers_for_tests as workers

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.memory import traced
from fsdp_helpers.models.series import build_model, count_params
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import units_by_hand

CUTS = (units_by_hand.shard_by_hand, units_by_hand.shard_by_torch)


def on_ranks(world_size: int, calls: list[tuple]) -> list:
    """Run several workers in one launch; for each rank what each of them returns."""
    return launch(workers.call_each, calls, world_size=world_size, device="cpu", timeout_s=240, progress=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_units_by_hand_are_those_of_fully_shard(world_size):
    config = TrainConfig(model="vit", global_batch_size=12, max_steps=3, train_images=60, test_images=10)
    calls = [(traced, units_by_hand.train_in_units, config, shard) for shard in CUTS]
    (losses, trace), (torch_losses, torch_trace) = on_ranks(world_size, calls)[0]
    assert losses == pytest.approx(torch_losses, abs=1e-5)
    # Four blocks and the root: 5 + 4 gathers, 5 reductions
    ops = [seen.op for seen in trace.collectives]
    assert ops == [seen.op for seen in torch_trace.collectives]
    assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (9, 5)
    # Between steps a rank holds shards: 16 bytes per parameter, divided by the ranks, and a unit's padding
    state = 16 * count_params(build_model("vit")) / world_size
    assert 1 <= trace.curve.held_bytes / state < 1.001


def test_a_gradient_is_the_mean_over_ranks():
    """Adam would not notice a sum: it divides by the gradient's own size."""
    by_hand, by_torch = on_ranks(2, [(workers.gradient_norm_in_units, cut) for cut in CUTS])[0]
    assert by_hand == pytest.approx(by_torch, rel=1e-5)
