"""Tied, frozen and ignored parameters, and buffers, behave as notebook 14 says.

What ends by itself shares a launch: each would cost a second, and all of them together take little more.
"""

import pytest
import torch
from workers_for_tests import call_each

from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.ranks.launching.launch import RankError, launch
from fsdp_helpers.teaching.lessons import special

SHAPE = VIT_SHAPES["vit-mnist"]


def on_two_ranks(worker, *args) -> list:
    return launch(worker, *args, world_size=2, device="cpu", timeout_s=240, progress=False)


@pytest.fixture(scope="module")
def found() -> dict:
    """By name, what the rank functions return on either rank."""
    calls = {cut: (special.train_tied, cut) for cut in ("not sharded", "nothing", "both ends")}
    calls |= {f"frozen, {api}": (special.train_frozen, SHAPE, 4, api) for api in ("fsdp1", "fsdp2")}
    calls |= {f"averaged: {averaged}": (special.train_ignoring, SHAPE, averaged) for averaged in (False, True)}
    calls |= {f"buffers, {name}": (special.train_with_buffers, name) for name in ("ddp", "fsdp1", "fsdp2")}
    return dict(zip(calls, zip(*on_two_ranks(call_each, list(calls.values())), strict=True), strict=True))


def test_tied_in_one_unit_stays_tied(found):
    losses, *_ = found["not sharded"][0]
    for cut in ("nothing", "both ends"):
        # embed and head share one, hidden has two
        assert found[cut][0] == (pytest.approx(losses, abs=1e-5), 3, 0.0)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="said of torch 2.15 and newer")
def test_tied_across_units_is_refused():
    with pytest.raises(RankError, match="head.weight.*is shared with a parameter already managed"):
        on_two_ranks(special.train_tied, "the head")
    with pytest.raises(RankError):
        on_two_ranks(special.train_tied, "FSDP1, the head")


def test_frozen_parameters_cost_fsdp2_no_reduction(found):
    # four detours of 64 x 4 and 4 x 192 values: 1,024 each, 4 bytes a value
    detours = 4 * 4 * 1_024
    for kept, counted in found["frozen, fsdp2"]:
        assert (kept.gradient_bytes, kept.optimizer_bytes) == (detours // 2, detours)
        assert {one.op: one.bytes for one in counted}["reduce_scatter"] == detours


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
        assert (seen.num_values, seen.saved) == (8, True) and seen.apart > 0
