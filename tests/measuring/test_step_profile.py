"""One measured step: which events, in which order, with how many bytes."""

from dataclasses import replace

import pytest
import torch
from runs import tiny_record
from torch import nn

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring import step_profile
from fsdp_helpers.measuring.step_profile import (
    cast_by_policy,
    measure_run,
    measure_step,
    predicted_peaks,
    settle,
    units_of,
)
from fsdp_helpers.planning.profile import Moment
from fsdp_helpers.sharding.recompute import checkpoint_activations


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def profile_of(model: nn.Module):
    images = torch.ones(4, 64)
    return measure_step(model, lambda: model(images).sum())


def test_events_and_bytes_of_two_layers():
    model = two_layers()
    profile = profile_of(model)
    assert profile.num_params == 64 * 128 + 128 + 128 * 10 + 10
    assert all(parameter.grad is None for parameter in model.parameters())
    walk = [(moment.event, moment.name) for moment in profile.moments if moment.event != "gradient"]
    assert walk == [
        ("enter_forward", ""),
        ("enter_forward", "0"),
        ("leave_forward", "0"),
        ("enter_forward", "2"),
        ("leave_forward", "2"),
        ("leave_forward", ""),
        ("enter_backward", "2"),
        ("enter_backward", ""),
        ("leave_backward", "2"),
        ("enter_backward", "0"),  # its input needs no gradient, so that nothing says when it is left
    ]
    finished = [moment.name for moment in profile.moments if moment.event == "gradient"]
    assert sorted(finished) == sorted(profile.shapes) and {*finished[:2]} == {"2.weight", "2.bias"}
    # Outputs, 4 bytes a value: 4 x 128 of the first layer, in its place as many of ReLU, and 4 x 10 of the second
    assert [moment.activation_bytes for moment in profile.moments[:6]] == [0, 0, 2_048, 2_048, 2_208, 2_208]
    # In flight where backward goes through the second layer: the gradients of its weight and of its input, at least
    entered = next(moment for moment in profile.moments if moment.event == "gradient")
    highest = max(moment.highest_bytes for moment in profile.moments[: profile.moments.index(entered)])
    assert highest >= 2_208 + 4 * (128 * 10) + 4 * (4 * 128)


def test_what_is_computed_again_is_no_second_forward():
    plain, checkpointed = two_layers(), checkpoint_activations(two_layers(), ["0", "2"], "units")
    forwards = [
        [moment.name for moment in profile_of(model).moments if moment.event == "enter_forward"]
        for model in (plain, checkpointed)
    ]
    assert forwards == [["", "0", "2"]] * 2  # and the names are those of the plain model


class Halves(nn.Linear):
    """A layer with two outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x).chunk(2, dim=-1)


def test_backward_enters_a_module_with_two_outputs_once():
    model = Halves(64, 8)
    profile = measure_step(model, lambda: sum(half.square().sum() for half in model(torch.ones(4, 64))))
    assert [moment.event for moment in profile.moments].count("enter_backward") == 1


class Widened(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def test_under_fsdp2s_policy_the_inputs_of_each_unit_are_cast():
    model = nn.Sequential(nn.Linear(64, 128), Widened(), nn.Linear(128, 10))
    with cast_by_policy(model, units=["2"]):
        assert model(torch.ones(4, 64)).dtype == torch.bfloat16
    with cast_by_policy(model), pytest.raises(RuntimeError, match="dtype"):  # the root's alone
        model(torch.ones(4, 64))


def test_at_one_tensor_modules_are_left_before_others_are_entered():
    def moment(event: str, name: str, highest_bytes: int = 5) -> Moment:
        return Moment(event=event, name=name, activation_bytes=5, highest_bytes=highest_bytes)

    seen = [moment("enter_backward", "a"), moment("leave_backward", "b"), moment("leave_backward", "b.norm", 9)]
    finished = moment("gradient", "a.weight")
    assert settle([finished, *seen, finished]) == (
        finished,
        moment("leave_backward", "b.norm"),
        moment("leave_backward", "b"),
        moment("enter_backward", "a", 9),
        finished,
    )
    # where something was allocated in between it is another tensor, and the order stays
    apart = [moment("enter_backward", "a", 6), moment("leave_backward", "b")]
    assert settle(apart) == tuple(apart)


def test_units_from_settings_alone():
    config = TrainConfig(model="simple", strategy="fsdp-auto-wrap", global_batch_size=8, min_num_params=20_000)
    assert units_of(config) == ["layers.7"]
    assert units_of(TrainConfig(model="simple", strategy="fsdp")) == []


def test_a_run_is_measured_on_one_micro_batch_of_one_rank():
    config = TrainConfig(model="vit", strategy="fsdp", global_batch_size=16, micro_batches=2)
    alone = replace(config, global_batch_size=4, micro_batches=1)
    assert measure_run(config, world_size=2).moments == measure_run(alone, world_size=1).moments


def test_runs_that_differ_only_in_their_shards_share_a_measurement(monkeypatch):
    measured = []

    def measure_run(config, world_size, device):
        levers = config.activation_checkpointing, config.precision, config.dropout
        measured.append((config.global_batch_size // world_size, *levers))
        return measure(config, world_size, device)

    measure = step_profile.measure_run
    monkeypatch.setattr(step_profile, "measure_run", measure_run)
    config = TrainConfig(model="vit", strategy="fsdp", global_batch_size=8)
    kinds = {"fsdp": {}, "ddp": {"strategy": "ddp"}, "half": {"global_batch_size": 4}}
    kinds["recomputed"] = {"strategy": "fsdp-auto-wrap", "activation_checkpointing": "units"}
    kinds |= {"bf16": {"precision": "bf16"}, "no dropout": {"dropout": False}}
    kinds |= {"cut": {"strategy": "fsdp-auto-wrap"}, "offload": {"strategy": "fsdp-offload"}}
    runs = {
        name: replace(tiny_record(), config=replace(config, **changes), world_size=2) for name, changes in kinds.items()
    }
    together = predicted_peaks(runs)
    assert together["offload"] == together["cut"]  # the memory of a run on the CPU is the host's
    assert measured[:3] == [(4, "none", "fp32", True), (2, "none", "fp32", True), (4, "units", "fp32", True)]
    assert measured[3:] == [(4, "none", "bf16", True), (4, "none", "fp32", False)]
    assert together == {name: predicted_peaks({name: run})[name] for name, run in runs.items()}
