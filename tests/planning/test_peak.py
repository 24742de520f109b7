"""The formulas: worked by hand, and held against real runs."""

from dataclasses import replace

import pytest
from runs import mostly_long

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.models import build_model, count_params
from fsdp_helpers.planning.peak import Workload, peak_bytes
from fsdp_helpers.planning.state import held_bytes
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.sharding.wrapping import size_policy, unit_sizes
from fsdp_helpers.training.worker import train_worker

FSDP_RUNS = [(strategy, api) for strategy in ("fsdp", "fsdp-auto-wrap") for api in ("fsdp1", "fsdp2")]


def test_held_bytes_hand_worked():
    # 1,000,000 parameters: 16 MB of state; DDP's buckets 4 MB more; over 4 ranks 16 / 4 = 4 MB
    assert held_bytes("local", 1_000_000, 1) == 16_000_000
    assert held_bytes("ddp", 1_000_000, 4) == 20_000_000
    assert held_bytes("fsdp", 1_000_000, 4) == 4_000_000


def test_peak_of_one_unit_hand_worked():
    # P = 100, N = 2, no activations; parameter slice and moments: 12 * 100 / 2 = 600
    # FSDP1 in the reduction: + gathered 400 + gradients 400 + their copy 400 = 1,800
    # FSDP2: gathered is freed, the slice of the result is new: 600 + 400 + 400 + 200 = 1,600
    workload = Workload(num_params=100)
    assert peak_bytes("fsdp", "fsdp1", workload, 2) == 1_800
    assert peak_bytes("fsdp", "fsdp2", workload, 2) == 1_600
    # with activations of 5,000: 600 + gathered 400 + gradients 400 + 5,000
    assert peak_bytes("fsdp", "fsdp1", replace(workload, activation_bytes=5_000), 2) == 6_400


def test_peak_of_two_units_hand_worked():
    # P = 100, one unit of 80, root of 20, N = 2: 600 for parameter slices and moments
    # FSDP1, reduction of the unit: root gathered 80, unit 3 * 320 = 960 -> 1,640
    # FSDP2: 80 + 2 * 320 + 160 = 880 -> 1,480
    workload = Workload(num_params=100, unit_params=(80,))
    assert peak_bytes("fsdp-auto-wrap", "fsdp1", workload, 2) == 1_640
    assert peak_bytes("fsdp-auto-wrap", "fsdp2", workload, 2) == 1_480


@pytest.mark.parametrize(("model", "batch"), mostly_long([("shallow", 128), ("deep", 32)]))
def test_formula_within_5_percent_of_measurement(model, batch):
    config = TrainConfig(model=model, strategy="ddp", global_batch_size=batch, max_steps=3, train_images=400)
    config = replace(config, test_images=1)
    network = build_model(model)
    num_params = count_params(network)
    one_process = replace(config, strategy="local", global_batch_size=batch // 2)
    local = launch(train_worker, one_process, world_size=1, device="cpu")[0].ranks[0]
    activation_bytes = local.peak_bytes - held_bytes("local", num_params, 1)
    for strategy, api in [("ddp", "fsdp2"), *FSDP_RUNS]:
        policy = size_policy(20_000) if strategy == "fsdp-auto-wrap" else None
        workload = Workload(
            num_params=num_params, unit_params=unit_sizes(network, policy), activation_bytes=activation_bytes
        )
        rank = launch(train_worker, replace(config, strategy=strategy, api=api), world_size=2, device="cpu")[0].ranks[0]
        predicted = peak_bytes(strategy, api, workload, 2)
        assert abs(predicted / rank.peak_bytes - 1) < 0.05, f"{strategy} {api}: {predicted} and {rank.peak_bytes}"
        assert abs(held_bytes(strategy, num_params, 2) / rank.held_bytes - 1) < 0.001
