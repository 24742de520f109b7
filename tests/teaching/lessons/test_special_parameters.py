"""Tied, frozen and ignored parameters, and buffers, behave as notebook 14 says."""

import pytest
import torch

from fsdp_helpers.ranks.launch import RankError, launch
from fsdp_helpers.teaching.lessons import special_parameters


def on_two_ranks(worker, *args) -> list:
    return launch(worker, *args, world_size=2, device="cpu", timeout_s=240, progress=False)


@pytest.fixture(scope="module")
def found() -> dict:
    """By name, what the rank functions return on either rank."""
    calls = {cut: (special_parameters.train_tied, cut) for cut in ("not sharded", "nothing", "both ends")}
    calls |= {f"frozen, {api}": (special_parameters.train_frozen, 4, api) for api in ("fsdp1", "fsdp2")}
    calls |= {f"averaged: {averaged}": (special_parameters.train_ignoring, averaged) for averaged in (False, True)}
    calls |= {
        f"buffers, {name}": (special_parameters.train_with_buffers, name)
        for name in ("ddp", "fsdp1", "fsdp2", "fsdp2, averaged")
    }
    calls |= {way: (special_parameters.train_two_layers, way) for way in special_parameters.WAYS}
    return {name: tuple(on_two_ranks(*call)) for name, call in calls.items()}


def test_each_choice_is_called_on_the_same_ranks():
    assert special_parameters.each(1, 2, lambda *arguments: arguments, ("a", "b")) == {
        "a": (1, 2, "a"),
        "b": (1, 2, "b"),
    }


def test_tied_in_one_unit_stays_tied(found):
    losses, *_ = found["not sharded"][0]
    for cut in ("nothing", "both ends"):
        # embed and head share one, hidden has two
        assert found[cut][0] == (pytest.approx(losses, abs=1e-5), 3, 0.0)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="said of torch 2.15 and newer")
def test_tied_across_units_is_refused():
    with pytest.raises(RankError, match="head.weight.*is shared with a parameter already managed"):
        on_two_ranks(special_parameters.train_tied, "the head")
    with pytest.raises(RankError):
        on_two_ranks(special_parameters.train_tied, "FSDP1, the head")


def test_frozen_parameters_cost_fsdp2_no_reduction(found):
    # four adapters of 64 x 4 and 4 x 192 values: 1,024 each, 4 bytes a value
    adapters = 4 * 4 * 1_024
    for kept, counted in found["frozen, fsdp2"]:
        assert (kept.gradient_bytes, kept.optimizer_bytes) == (adapters // 2, adapters)
        assert {one.op: one.bytes for one in counted}["reduce_scatter"] == adapters


def test_fsdp1_reduces_what_is_frozen_too(found):
    # four blocks of 49,984 + 1,024 values
    kept = found["frozen, fsdp1"]
    for _, counted in kept:
        assert {one.op: one.bytes for one in counted}["reduce_scatter"] == 4 * 4 * (49_984 + 1_024)
    assert sum(state.gradient_bytes for state, _ in kept) == 4 * 4 * 1_024  # wherever the cut falls


def test_ignored_parameters_drift_apart_unless_averaged(found):
    kind, apart = found["averaged: False"][0]
    assert kind == "Parameter" and apart > 0
    assert found["averaged: True"] == (("Parameter", 0.0),) * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_buffers_are_whole_and_differ(strategy, found):
    for seen in found[f"buffers, {strategy}"]:
        assert (seen.num_values, seen.saved) == (8, True) and seen.apart > 0 and seen.variances_apart > 0


def test_averaged_buffers_are_equal_variances_included(found):
    """All ranks have the mean of what they had, which is that of fsdp2 without averaging."""
    for seen in found["buffers, fsdp2, averaged"]:
        assert (seen.apart, seen.variances_apart) == (0.0, 0.0)


# Rank 0's sample is 2, and passes a layer of weights 1 to two outputs: 4. Rank 1's is 20, of weights 2: 80.
# The mean over two ranks of a layer's gradients: 2 / 2 and 20 / 2.
RIGHT = ((4.0, [1.0, 10.0]), (80.0, [1.0, 10.0]))


@pytest.mark.parametrize("way", ["DDP", "unused as zeros", "each layer a unit, all called"])
def test_ranks_that_use_different_layers(way, found):
    assert found[way] == RIGHT


def test_without_a_word_fsdp2_mixes_their_gradients(found):
    assert found["FSDP2 as it is"] == ((4.0, [11.0, None]), (80.0, [None, 11.0]))


def test_as_units_of_their_own_their_weights_too(found):
    """Each rank has one row of its own layer and one of the other's: 2 x (1 + 2) and 20 x (1 + 2)."""
    assert found["each layer a unit"] == ((6.0, [11.0, None]), (60.0, [None, 11.0]))
