from functools import partial

import pytest
import torch
import workers_for_tests as workers
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy

from fsdp_helpers.models.series import ConvFeatures, build_model
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.sharding.wrapping import choose_units, holders_of_ties, size_policy

CONVOLUTIONS = ["features.0", "features.2"]  # 320 and 18,496 parameters


def is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features >= 1000


def has_kernels(module: nn.Module) -> bool:
    return isinstance(module, ConvFeatures | nn.Conv2d)


def model_without_values(name: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(name)


POLICIES = {
    "size 0": size_policy(0),
    "size 100": size_policy(100),
    "size 20,000": size_policy(20_000),
    "size 100,000,000": size_policy(100_000_000),
    "linear": ModuleWrapPolicy({nn.Linear}),
    "features and their convolutions": ModuleWrapPolicy({ConvFeatures, nn.Conv2d}),
    "custom": CustomPolicy(has_kernels),
    "wide": partial(lambda_auto_wrap_policy, lambda_fn=is_wide),
}


@pytest.mark.parametrize(
    "policy, shallow, deep",
    [
        # Each layer with parameters has more than 100 of them, and leaves none for the modules around it.
        (
            "size 100",
            [*CONVOLUTIONS, "fc1", "fc2"],
            [*CONVOLUTIONS, "fc1", "fc2", "fc3", "fc4", "fc5", "fc6"],
        ),
        # The convolutions together have 18,816 parameters, the last layer 1,290: both too small.
        ("size 20,000", ["fc1"], ["fc1", "fc2", "fc3", "fc4", "fc5"]),
        # The default of PyTorch's policy; DeepNet as a whole has 94,104,234 parameters.
        ("size 100,000,000", [], []),
        ("linear", ["fc1", "fc2"], ["fc1", "fc2", "fc3", "fc4", "fc5", "fc6"]),
        ("features and their convolutions", [*CONVOLUTIONS, "features"], [*CONVOLUTIONS, "features"]),
        ("custom", [*CONVOLUTIONS, "features"], [*CONVOLUTIONS, "features"]),
        # fc1 to fc4 put out 9,000, 1,000, 1,000 and 1,000 values; ShallowNet's fc1 puts out 128
        ("wide", [], ["fc1", "fc2", "fc3", "fc4"]),
    ],
)
def test_the_chosen_units(policy, shallow, deep):
    assert choose_units(model_without_values("shallow"), POLICIES[policy]) == shallow
    assert choose_units(model_without_values("deep"), POLICIES[policy]) == deep


def test_what_a_unit_inside_has_taken_does_not_count_again():
    # inner: 10 x 10 + 10 = 110; outer has 110 + 30 more of its own. Threshold 100: inner is a unit, 30 are too few.
    inner, extra = nn.Linear(10, 10), nn.Linear(5, 5)
    model = nn.ModuleDict({"outer": nn.Sequential(inner, extra)})
    assert choose_units(model, size_policy(100)) == ["outer.0"]
    assert choose_units(model, size_policy(30)) == ["outer.0", "outer.1"]
    assert choose_units(model, size_policy(140)) == ["outer"]  # neither is large enough, both together are


def test_what_is_tied_outside_a_module_is_left_to_a_unit_around_both():
    # The table (5 x 10) is also the head's. "inside" holds it and a norm; both tables lie in "whole".
    table, head = nn.Embedding(5, 10), nn.Linear(10, 5, bias=False)
    head.weight = table.weight
    inside = nn.Sequential(table, nn.Linear(10, 10))
    model = nn.ModuleDict({"whole": nn.Sequential(inside, head)})
    assert holders_of_ties(model) == {inside, table, head}
    assert holders_of_ties(model_without_values("shallow")) == set()
    assert choose_units(model, size_policy(50, holders_of_ties(model))) == ["whole.0.1", "whole"]
    assert choose_units(model, size_policy(50)) == ["whole.0.0", "whole.0.1", "whole.1"]  # a tie across two units


def test_settings_of_a_single_unit_are_refused():
    policy = CustomPolicy(lambda module: {"sharding_strategy": "full"} if isinstance(module, nn.Linear) else False)
    with pytest.raises(ValueError, match="for a Linear, but only FSDP1 supports settings per unit"):
        choose_units(model_without_values("shallow"), policy)


def owners_of_parameters(model: nn.Module, units: list[str]) -> list[str]:
    """The chosen units that have parameters of their own; others gather nothing, and aren't counted."""
    inside = [[unit for unit in units if name.startswith(f"{unit}.")] for name, _ in model.named_parameters()]
    return sorted({max(around, key=len) for around in inside if around})


def test_both_apis_have_the_units_that_were_chosen():
    cases = {"shallow": POLICIES, "vit": POLICIES, "deep": ["size 20,000"]}
    for model, names in cases.items():
        policies = [POLICIES[name] for name in names]
        (found,) = launch(workers.units_of_both_apis, model, policies, world_size=1, device="cpu")
        for name, (fsdp1, fsdp2) in zip(names, found, strict=True):
            plain = model_without_values(model)
            chosen = owners_of_parameters(plain, choose_units(plain, POLICIES[name]))
            assert (model, name, fsdp1) == (model, name, chosen)
            assert (model, name, fsdp2) == (model, name, chosen)
