"""The same commands on CUDA: nccl, one rank a device."""

import launch_workers as workers
import pytest
import torch

from fsdp_helpers.checkpointing.folder import checkpoint_name
from fsdp_helpers.checkpointing.shard_index import read_index
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.gpus import choose_device
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.training.worker import train_worker

pytestmark = pytest.mark.gpu


def settings(data_dir) -> dict:
    return {"global_batch_size": 32, "max_steps": 8, "test_images": 101, "dropout": False, "data_dir": str(data_dir)}


def test_auto_is_cuda_where_every_rank_gets_a_device():
    found = torch.cuda.device_count()
    assert choose_device("auto", found) == "cuda"
    assert choose_device("auto", found + 1) == "cpu"


def test_one_device_a_rank():
    found = torch.cuda.device_count()
    expected = [(float(found), f"cuda:{rank}", rank) for rank in range(found)]
    assert launch(workers.all_reduce_on_device, world_size=found, device="cuda") == expected


@pytest.mark.parametrize("strategy", ["local", "ddp"])
def test_losses_equal_those_of_the_cpu(strategy, digits_dir):
    config = TrainConfig(strategy=strategy, **settings(digits_dir))
    cuda = launch(train_worker, config, world_size=1, device="cuda")[0]
    cpu = launch(train_worker, config, world_size=1, device="cpu")[0]
    assert (cuda.device, cpu.device) == ("cuda", "cpu")
    # CUDA's convolutions may round their inputs (TF32), so they agree to three digits, not to all.
    assert cuda.step_losses == pytest.approx(cpu.step_losses, abs=1e-3)
    assert cuda.epochs[0].test_images == 101


def test_the_curve_is_what_tensors_asked_for():
    device = torch.device("cuda", 0)
    with trace_memory(device) as trace:
        before = requested(device, "current")
        kept = torch.empty(1_000_000, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        workspace = torch.empty(2_000_001, device=device)
        del workspace
        highest, at_the_end = requested(device, "peak") - before, requested(device, "current") - before
    curve = trace.whole().curve
    # 1,000,000 values of 4 bytes stay, 2,000,001 come and go
    assert curve.held_bytes == at_the_end == kept.nbytes == 4_000_000
    assert curve.peak_bytes == highest == 4_000_000 + 8_000_004
    assert trace.whole().reserved_bytes >= torch.cuda.max_memory_allocated(device) >= curve.peak_bytes


def requested(device, which) -> int:
    return torch.cuda.memory_stats(device)[f"requested_bytes.all.{which}"]


@pytest.mark.parametrize(
    "strategy, api", [("local", "fsdp2"), ("ddp", "fsdp2"), ("fsdp-auto-wrap", "fsdp1"), ("fsdp-offload", "fsdp2")]
)
def test_five_steps_and_five_more_are_ten(strategy, api, digits_dir, tmp_path):
    """With dropout on, which draws from the device's own random numbers; these are saved as well."""
    always = settings(digits_dir) | {"strategy": strategy, "api": api, "dropout": True, "train_images": 100}
    always |= {"epochs": 5, "checkpoint_dir": str(tmp_path / "run")}  # 3 steps an epoch
    undisturbed, first, second = (
        launch(train_worker, TrainConfig(**always | changes), world_size=1, device="cuda")[0]
        for changes in (
            {"max_steps": 10, "checkpoint_dir": None},
            {"max_steps": 5},
            {"max_steps": 10, "resume": True},
        )
    )
    assert (first.first_step, second.first_step) == (0, 5)
    # The masks are the same, and a wrong mask changes a loss by far more than the order of sums on a GPU does.
    assert first.step_losses + second.step_losses == pytest.approx(undisturbed.step_losses, abs=1e-4)
    names = [entry.name for entry in read_index(tmp_path / "run" / checkpoint_name(10))]
    assert {name for name in names if name.startswith("extra.")} == {
        "extra.random-state-0",
        "extra.random-state-cuda-0",
    }


@pytest.mark.parametrize("kind", ["units", "selective"])
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_activation_checkpointing_draws_the_same_dropout_again(api, kind, digits_dir):
    unlike = {"model": "vit", "min_num_params": 40_000, "dropout": True, "max_steps": 4}
    configs = [
        TrainConfig(
            strategy="fsdp-auto-wrap", api=api, activation_checkpointing=chosen, **settings(digits_dir) | unlike
        )
        for chosen in ("none", kind)
    ]
    plain, checkpointed = (launch(train_worker, config, world_size=1, device="cuda")[0] for config in configs)
    # The same operations in the same order; a library may still choose another algorithm, so not to the last bit.
    assert checkpointed.step_losses == pytest.approx(plain.step_losses, abs=1e-5)
    assert checkpointed.ranks[0].peak_bytes < plain.ranks[0].peak_bytes


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_bf16_and_accumulation(api, digits_dir):
    levers = {"precision": "bf16", "micro_batches": 2}
    config = TrainConfig(strategy="fsdp-auto-wrap", api=api, **levers, **settings(digits_dir))
    plain = TrainConfig(strategy="fsdp-auto-wrap", api=api, **settings(digits_dir))
    run, expected = (launch(train_worker, chosen, world_size=1, device="cuda")[0] for chosen in (config, plain))
    assert run.step_losses == pytest.approx(expected.step_losses, rel=0.02)
