"""Activation checkpointing changes what is kept, not what is computed: the same losses, to the last bit."""

import pytest
import torch
from runs import Runs, mostly_long
from torch import nn

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.activations import kept_bytes, products_bytes
from fsdp_helpers.models.series import build_model
from fsdp_helpers.records import RunRecord
from fsdp_helpers.sharding.recompute import checkpoint_activations, is_checkpointed
from fsdp_helpers.sharding.strategies import apply_local
from fsdp_helpers.sharding.wrapping import choose_units, size_policy

BLOCKS = [f"blocks.{index}" for index in range(4)]  # of "vit", 49,984 parameters each
CONFIGURATIONS = [
    ("local", "fsdp2"),
    ("ddp", "fsdp2"),
    ("fsdp", "fsdp1"),
    ("fsdp", "fsdp2"),
    ("fsdp-auto-wrap", "fsdp1"),
    ("fsdp-auto-wrap", "fsdp2"),
    ("fsdp-offload", "fsdp2"),
]
SHARDED_UNITS = CONFIGURATIONS[4:]

NESTED = 16_500  # in each block of "vit" linear1 (16,640), and the block with what is left (33,344)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs of "vit", dropout on, on the digits; on two ranks, and of the plain model on one."""
    always = {"model": "vit", "min_num_params": 40_000, "max_steps": 3, "global_batch_size": 16, "test_images": 12}
    runs = Runs(**always, data_dir=str(tmp_path_factory.mktemp("no-mnist")))

    def run(strategy: str, api: str = "fsdp2", **settings) -> RunRecord:
        return runs(strategy, api, 1 if strategy == "local" else 2, **settings)

    return run


# ---------------------------------------------------------------- the same numbers


# Telling: one process; FSDP2, with both kinds; FSDP1, to which either kind is the same wrapper.
@pytest.mark.parametrize(
    "kind, strategy, api",
    mostly_long([(kind, *way) for kind in ("units", "selective") for way in CONFIGURATIONS], telling=(0, 4, 5, 7, 12)),
)
def test_the_same_losses_bit_for_bit_with_dropout(kind, strategy, api, run):
    plain, checkpointed = run(strategy, api), run(strategy, api, activation_checkpointing=kind)
    assert len(plain.step_losses) == 3
    assert checkpointed.step_losses == plain.step_losses
    assert checkpointed.epochs[0].test_loss == plain.epochs[0].test_loss
    assert checkpointed.ranks[0].peak_bytes < plain.ranks[0].peak_bytes


def test_selective_keeps_more_than_units_do(run):
    """It keeps the matrix products."""
    kinds = ("units", "selective", "none")
    units, selective, plain = (run("local", activation_checkpointing=kind).ranks[0].peak_bytes for kind in kinds)
    assert units < selective < plain


@pytest.mark.parametrize("strategy, api", mostly_long(SHARDED_UNITS, telling=(0, 1)))
def test_the_same_units_and_the_same_collectives(strategy, api, run):
    """Checkpointed first, sharded second: a unit is gathered once in backward, for recomputing and for gradients."""
    plain, checkpointed = (run(strategy, api, activation_checkpointing=kind).ranks[0] for kind in ("none", "units"))
    assert checkpointed.num_units == plain.num_units == 5
    assert checkpointed.collectives == plain.collectives
    # the root once and four blocks twice
    assert [(seen.op, seen.count) for seen in plain.collectives] == [("all_gather", 9), ("reduce_scatter", 5)]


def test_in_bf16_too(run):
    plain, checkpointed = (
        run("fsdp-auto-wrap", precision="bf16", max_steps=2, activation_checkpointing=kind)
        for kind in ("none", "units")
    )
    assert checkpointed.step_losses == plain.step_losses


# ---------------------------------------------------------------- names and wrappers


def test_names_stay_those_of_the_plain_model():
    plain, wrapped = build_model("vit"), checkpoint_activations(build_model("vit"), BLOCKS, "units")
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(wrapped.state_dict())  # and back
    wrapped.load_state_dict(plain.state_dict())


def test_the_chosen_modules_are_wrapped_and_no_others():
    model = build_model("vit")
    checkpoint_activations(model, choose_units(model, size_policy(40_000)), "selective")
    found = [name for name, module in model.named_modules() if is_checkpointed(module)]
    assert found == BLOCKS


def test_units_within_units_are_recomputed_once():
    model = build_model("vit")
    calls = []
    for block in model.blocks:
        block.linear1.register_forward_hook(lambda *_: calls.append(1))
    settings = {"min_num_params": NESTED, "activation_checkpointing": "units"}
    apply_local(model, torch.device("cpu"), TrainConfig(model="vit", **settings))
    model(torch.randn(2, 1, 28, 28)).sum().backward()
    assert len(calls) == 4 + 4  # four blocks, in forward and once more in backward


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_units_within_units_stay_units(api, run):
    settings = {"min_num_params": NESTED, "max_steps": 2}
    plain, checkpointed = (
        run("fsdp-auto-wrap", api, activation_checkpointing=kind, **settings) for kind in ("none", "units")
    )
    assert [record.ranks[0].num_units for record in (plain, checkpointed)] == [4 * 2 + 1] * 2
    assert checkpointed.step_losses == plain.step_losses


def test_nothing_to_wrap_is_an_error():
    with pytest.raises(ValueError, match="no module of VisionTransformer is large enough to checkpoint; lower min_num"):
        checkpoint_activations(build_model("vit"), [], "units")


# ---------------------------------------------------------------- counted bytes


def test_kept_bytes_hand_worked():
    # Linear keeps its input, 2 x 3 values; ReLU its output, 2 x 5 values; the weights do not count: 16 x 4 = 64 bytes
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    assert kept_bytes(model, torch.ones(2, 3)) == 64
    # a second layer keeps ReLU's output too, and it is still there only once
    assert kept_bytes(nn.Sequential(*model, nn.Linear(5, 1)), torch.ones(2, 3)) == 64


def test_products_bytes_hand_worked():
    # 2 x 5 and 2 x 1 values
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    assert products_bytes(model, torch.ones(2, 3)) == 4 * (10 + 2)
    # a batch of products, as in attention: 7 of 2 x 2
    assert products_bytes(Scores(), torch.ones(7, 2, 3)) == 4 * 7 * 4


class Scores(nn.Module):
    def forward(self, tokens):
        return tokens @ tokens.transpose(1, 2)
