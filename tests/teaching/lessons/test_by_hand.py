"""What the notebooks show by hand is what the real thing does."""

import math

import pytest
import torch
from runs import mostly_long, train
from torch import nn

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.collectives import count_collectives
from fsdp_helpers.measuring.memory import traced
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.lessons import by_hand, probes


def settings(data_dir) -> dict:
    return {"max_steps": 6, "global_batch_size": 24, "test_images": 12, "data_dir": str(data_dir)}


@pytest.mark.parametrize("world_size", mostly_long([2, 3], telling=(1,)))
def test_by_hand_equals_the_real_ones(world_size, digits_dir):
    config = TrainConfig(**settings(digits_dir))
    ddp = train("ddp", world_size, **settings(digits_dir))[0].step_losses
    ddp_by_hand = launch(by_hand.train_ddp_by_hand, config, world_size=world_size, device="cpu")
    fsdp_by_hand = launch(traced, by_hand.train_fsdp_by_hand, config, world_size=world_size, device="cpu")
    assert len(ddp) == 6
    for losses in [*ddp_by_hand, *(losses for losses, _ in fsdp_by_hand)]:
        assert losses == pytest.approx(ddp, abs=1e-5)
    # 1,199,882 = 2 x 599,941 = 3 x 399,961 - 1: with three ranks one zero is added
    whole_bytes = {2: 4 * 1_199_882, 3: 4 * 1_199_883}[world_size]
    for _, trace in fsdp_by_hand:
        counts = {seen.op: (seen.count, seen.bytes) for seen in count_collectives(trace.collectives)}
        assert counts == {"all_gather": (1, whole_bytes), "reduce_scatter": (1, whole_bytes)}
        # parameters, gradients and two moments of a shard, and a few bytes for losses and a step counter
        assert trace.curve.held_bytes == pytest.approx(4 * whole_bytes / world_size, abs=1_000)
        assert trace.curve.peak_bytes > trace.curve.held_bytes + whole_bytes


def test_a_flat_unit_pads_with_zeros():
    # 2 x 3 weights and 3 biases are 9 values; 4 ranks need 12: shards of 3, the last of them all padding
    def module():
        layer = nn.Linear(2, 3)
        layer.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        layer.bias.data = torch.tensor([7.0, 8.0, 9.0])
        return layer

    units = [by_hand.FlatUnit(module(), rank, world_size=4) for rank in range(4)]
    assert [unit.padding for unit in units] == [3] * 4
    assert [unit.shard.tolist() for unit in units] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]]
    assert all(parameter.numel() == 0 for unit in units for parameter in unit.parameters)  # freed


def test_no_padding_where_the_ranks_divide():
    # 9 values over 3 ranks, and over 1
    assert [by_hand.FlatUnit(nn.Linear(2, 3), 0, world_size=count).padding for count in (3, 1)] == [0, 0]


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_norms_of_shards_make_the_norm_of_the_whole(api, digits_dir):
    config = TrainConfig(dropout=False, **settings(digits_dir))
    ((own, whole),) = launch(probes.norms_of_a_gradient, config, world_size=1, device="cpu")
    assert own == pytest.approx(whole, rel=1e-5)  # one process has all of it
    sharded = TrainConfig(strategy="fsdp", api=api, dropout=False, **settings(digits_dir))
    found = launch(probes.norms_of_a_gradient, sharded, world_size=3, device="cpu")
    assert [reported for _, reported in found] == pytest.approx([whole] * 3, rel=1e-5)
    assert math.hypot(*(own for own, _ in found)) == pytest.approx(whole, rel=1e-5)
