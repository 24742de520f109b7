"""The highest point of a step, worked by hand. Runs hold it against measurement in `test_peak_measured.py`."""

from dataclasses import replace

import pytest

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.planning import peak as peak_module
from fsdp_helpers.planning.peak import peak_of_step, walk_step
from fsdp_helpers.planning.profile import Moment, StepProfile
from fsdp_helpers.planning.walk.ledger import KINDS, Ledger, Term
from fsdp_helpers.planning.walk.units import make_units

UNITS = ("a", "b")


def two_layers(values: int = 160, kept: int = 0, working: int = 0) -> StepProfile:
    """Layers a and b, one parameter each; each keeps `kept` bytes, and has `working` more in flight in backward.

    Nothing else: no root parameters, and what a layer kept is freed with its gradient.
    """
    walk = [
        ("enter_forward", "", 0, 0),
        ("enter_forward", "a", 0, kept),
        ("leave_forward", "a", kept, kept),
        ("enter_forward", "b", kept, 2 * kept),
        ("leave_forward", "b", 2 * kept, 2 * kept),
        ("leave_forward", "", 2 * kept, 2 * kept),
        ("enter_backward", "", 2 * kept, 2 * kept),
        ("enter_backward", "b", 2 * kept, 2 * kept + working),
        ("gradient", "b.weight", kept, kept),
        ("leave_backward", "b", kept, kept),
        ("enter_backward", "a", kept, kept + working),
        ("gradient", "a.weight", 0, 0),
        ("leave_backward", "a", 0, 0),
    ]
    names = ("event", "name", "activation_bytes", "highest_bytes")
    moments = tuple(Moment(**dict(zip(names, line, strict=True))) for line in walk)
    return StepProfile(shapes={"a.weight": (values,), "b.weight": (values,)}, moments=moments)


def peak(profile: StepProfile, world_size: int, units=(), backend="gloo", **settings):
    return peak_of_step(profile, TrainConfig(**settings), world_size, units, backend=backend)


# ---------------------------------------------------------------- whole models


def test_early_in_backward_there_are_no_gradients_yet():
    # P = 320: parameters and moments 12 P = 3,840. In b: 2 x 5,000 kept and 600 in flight, no gradient: 14,440.
    profile = two_layers(kept=5_000, working=600)
    assert peak(profile, 1, strategy="local").bytes == 3_840 + 10_600
    # DDP's buckets are always there: 4 P = 1,280; where they are the gradients too
    for bucket_view in (False, True):
        assert peak(profile, 2, strategy="ddp", bucket_view=bucket_view).bytes == 3_840 + 10_600 + 1_280


def test_late_in_backward_all_gradients_are_there():
    # No activations: 16 P = 5,120 at the end, 20 P with buckets, 16 P again where these are the gradients
    profile = two_layers()
    assert peak(profile, 1, strategy="local").bytes == 5_120
    assert peak(profile, 2, strategy="ddp").bytes == 6_400
    assert peak(profile, 2, strategy="ddp", bucket_view=True).bytes == 5_120


# ---------------------------------------------------------------- one unit


def test_one_unit_on_two_ranks():
    # Shards of parameters and moments: 12 x 320 / 2 = 1,920. One unit has 1,280 bytes of parameters.
    # The reduction: laid out for sending, gloo's copy, and a shard, 640. NCCL needs no copy: the all-gather's
    # buffer and the parameters copied out of it are as much as the gradients and their layout, 2 x 1,280.
    assert peak(two_layers(), 2, strategy="fsdp").bytes == 1_920 + 2 * 1_280 + 640
    assert peak(two_layers(), 2, strategy="fsdp", backend="nccl").bytes == 1_920 + 2 * 1_280


def test_activations_beside_one_unit():
    # FSDP2 keeps the all-gather's buffer through forward: 1,920 + 2 x 1,280 + 2 x 5,000 at its end
    fsdp2 = peak(two_layers(kept=5_000), 2, strategy="fsdp")
    assert (fsdp2.bytes, fsdp2.when) == (1_920 + 2 * 1_280 + 10_000, "forward, in b")


# ---------------------------------------------------------------- two units


def test_two_units_on_sixteen_ranks_gathering():
    # 16 ranks: shards 12 x 320 / 16 = 240; a unit is 640. Backward enters b with 2 x 5,000 kept:
    # b gathered, the buffer into which a is gathered, and gloo's copy of that: 3 x 640
    profile = two_layers(kept=5_000)
    cut = peak(profile, 16, UNITS, strategy="fsdp-auto-wrap")
    assert (cut.bytes, cut.when) == (240 + 3 * 640 + 10_000, "backward, in b")
    # with 100 in flight in b gloo's copy is gone by then, 640 less: it is still the gathering
    assert peak(two_layers(kept=5_000, working=100), 16, UNITS, strategy="fsdp-auto-wrap").bytes == cut.bytes
    assert peak(two_layers(kept=5_000, working=700), 16, UNITS, strategy="fsdp-auto-wrap").bytes == cut.bytes + 60
    # NCCL: no copy
    assert peak(profile, 16, UNITS, "nccl", strategy="fsdp-auto-wrap").bytes == 240 + 2 * 640 + 10_000


def test_two_units_on_sixteen_ranks_reducing():
    # No activations. FSDP2: what b sent stays until a's turn, 640; there a's gradients and their layout ... in detail:
    # b's gradients reduced: a's buffer 640, layout 640, gloo's copy 640, b's shard 40 -> 1,960
    # a gathered: its buffer, the copy out of it, what b sent, b's shard 40 -> 1,960; its gradients instead of the
    # buffer: as much. a reduced: layout, copy, two shards: less.
    assert peak(two_layers(), 16, UNITS, strategy="fsdp-auto-wrap").bytes == 240 + 1_960


def test_each_unit_is_gathered_twice_and_reduced_once():
    # Of the root there is nothing; a and b 640 each, in forward and in backward
    (gathers, reduces) = walk_step(two_layers(), TrainConfig(strategy="fsdp-auto-wrap"), 16, UNITS).collectives
    assert (gathers.op, gathers.count, gathers.bytes) == ("all_gather", 4, 4 * 640)
    assert (reduces.op, reduces.count, reduces.bytes) == ("reduce_scatter", 2, 2 * 640)


def test_a_unit_that_is_not_left_is_reduced_at_the_end():
    # Nothing says when b is left, as where other modules share its input
    whole = two_layers()
    unsaid = tuple(moment for moment in whole.moments if moment.event != "leave_backward")
    late = peak(replace(whole, moments=unsaid), 16, UNITS, "nccl", strategy="fsdp-auto-wrap")
    assert late.bytes > peak(whole, 16, UNITS, "nccl", strategy="fsdp-auto-wrap").bytes


def test_fsdp1_is_refused():
    with pytest.raises(ValueError, match="the planner covers FSDP2"):
        peak(two_layers(), 2, strategy="fsdp", api="fsdp1")
    assert peak(two_layers(), 2, strategy="ddp", api="fsdp1").bytes  # which no strategy but FSDP's looks at


def test_fsdp2_frees_the_buffer_of_an_inner_unit_when_it_is_computed_again():
    # b lies in the checkpointed a. Its forward within a's backward begins and ends there, as if it were the root's.
    walk = [
        ("enter_forward", "", 0), ("enter_forward", "a", 0), ("enter_forward", "a.b", 0), ("leave_forward", "a.b", 0),
        ("leave_forward", "a", 0), ("leave_forward", "", 0), ("enter_backward", "", 0), ("enter_backward", "a", 0),
        ("enter_forward", "a.b", 0), ("leave_forward", "a.b", 0), ("enter_backward", "a.b", 9_000),
        ("gradient", "a.b.weight", 0), ("leave_backward", "a.b", 0), ("gradient", "a.weight", 0),
        ("leave_backward", "a", 0),
    ]  # fmt: skip
    moments = [Moment(event=event, name=name, activation_bytes=size, highest_bytes=size) for event, name, size in walk]
    shapes = {"a.weight": (160,), "a.b.weight": (160,)}
    config = {"strategy": "fsdp-auto-wrap"}
    # Shards 12 x 320 / 2 = 1,920; a and b gathered
    whole = StepProfile(shapes=shapes, moments=tuple(moments))
    assert peak(whole, 2, ["a", "a.b"], "nccl", **config).bytes == 1_920 + 2 * 640 + 9_000
    # torch stops computing again as soon as it has what it needs: if that is within b, the buffer stays
    stopped = replace(whole, moments=tuple(moments[:9] + moments[10:]))
    assert peak(stopped, 2, ["a", "a.b"], "nccl", **config).bytes == 1_920 + 3 * 640 + 9_000


def test_shards_are_offloaded_where_there_is_a_host():
    offload = TrainConfig(strategy="fsdp-offload")
    # A rank on the CPU has no other memory: as above, 240 of shards and 1,960 early in a's backward.
    assert walk_step(two_layers(), offload, 16, UNITS).peak.bytes == 240 + 1_960
    # Beside a device all shards lie in the host's, b's reduced gradient, 40, too: a and its buffer, and what b sent
    assert walk_step(two_layers(), offload, 16, UNITS, has_host=True).peak.bytes == 3 * 640


def test_grad_op_keeps_what_forward_gathered():
    # 16 ranks, early in backward: a and b whole, nothing to gather
    profile = two_layers(kept=5_000)
    kept = peak(profile, 16, UNITS, strategy="fsdp-auto-wrap", sharding="grad-op")
    assert kept.by_kind()["gathered"] == 2 * 640
    # a setting of FSDP2 does the same to its units
    kept = peak(profile, 16, UNITS, strategy="fsdp-auto-wrap", reshard_after_forward=False)
    assert kept.by_kind()["gathered"] == 2 * 640
    # "hybrid" shards over half of the ranks: 12 x 320 / 8
    assert peak(profile, 16, UNITS, strategy="fsdp", sharding="hybrid").by_kind()["optimizer"] == 8 * 320 // 8


def test_a_cpu_lays_gradients_out_with_copies():
    # One unit of 7 + 7 rows of 100 on 4 ranks: filled up to 8 + 8. Shards 12 x 1,600 / 4 = 4,800; gradients 5,600, laid
    # out in 6,400, beside copies that are filled up, 6,400 more. A GPU needs the first three: and before, a shard less,
    # the buffer of the all-gather beside the parameters copied out of it, 2 x 6,400.
    shapes = {"a.weight": (7, 100), "b.weight": (7, 100)}
    uneven = replace(two_layers(), shapes=shapes)
    assert peak(uneven, 4, strategy="fsdp", backend="fake").bytes == 4_800 + 5_600 + 2 * 6_400
    assert peak(uneven, 4, strategy="fsdp", backend="nccl").bytes == 4_800 + 2 * 6_400
    # In bf16: gradients 2,800, laid out in fp32, 6,400; filled up 3,200, and one after the other in bf16, 1,600
    in_bf16 = peak(uneven, 4, strategy="fsdp", precision="bf16", backend="fake")
    assert in_bf16.bytes == 4_800 + 2_800 + 6_400 + 3_200 + 1_600
    # 8 rows need no filling up
    even = replace(two_layers(), shapes={"a.weight": (8, 100), "b.weight": (8, 100)})
    assert peak(even, 4, strategy="fsdp", backend="fake").bytes == 4_800 + 2 * 6_400


# ---------------------------------------------------------------- levers


def test_bf16_halves_what_is_gathered_and_its_gradient():
    # As in the gathering on sixteen ranks, with units of 320 bytes; shards and moments stay fp32
    cut = {"strategy": "fsdp-auto-wrap", "precision": "bf16"}
    # and the bf16 copy of a shard that is sent, 2 x 160 / 16
    assert peak(two_layers(kept=5_000), 16, UNITS, **cut).bytes == 240 + 3 * 320 + 20 + 10_000


def test_micro_batches():
    # Two parts on 16 ranks, the second early in backward: gathering 240 + 3 x 640 + 10,000 as above, and
    waiting = {"strategy": "fsdp-auto-wrap", "micro_batches": 2, "sync_micro_batches": False}
    profile = two_layers(kept=5_000)
    # whole gradients of both units, 2 x 640, that wait to be reduced once
    assert peak(profile, 16, UNITS, **waiting).bytes == 12_160 + 2 * 640
    # or the shards of the first part, 2 x 40, to which those of the second are added
    for parts in (2, 3):
        each = {**waiting, "micro_batches": parts, "sync_micro_batches": None}  # as nobody says otherwise
        assert peak(profile, 16, UNITS, **each).bytes == 12_160 + 2 * 40
    # where everything is whole, the gradients of the first part are there early
    assert peak(profile, 1, strategy="local", micro_batches=2).bytes == 3_840 + 1_280 + 10_000
    # Whole gradients wait in fp32, 2 x 640, also where parameters are gathered in bf16, 320 each
    in_bf16 = peak(profile, 16, UNITS, **waiting, precision="bf16")
    assert in_bf16.bytes == 240 + 3 * 320 + 20 + 10_000 + 2 * 640


@pytest.mark.parametrize("sync", [None, False])
def test_parts_between_the_first_and_the_last_are_counted_without_a_walk(sync, monkeypatch):
    cut = {"strategy": "fsdp-auto-wrap", "micro_batches": 7, "sync_micro_batches": sync}
    config = TrainConfig(**cut, global_batch_size=7 * 16)
    short = walk_step(two_layers(kept=5_000), config, 16, UNITS)
    monkeypatch.setattr(peak_module, "WALKED_PARTS", 7)
    assert walk_step(two_layers(kept=5_000), config, 16, UNITS) == short


def test_buffers_are_on_every_rank():
    plain, tables = two_layers(), replace(two_layers(), buffer_bytes=777)
    for settings in ({"strategy": "local"}, {"strategy": "ddp"}, {"strategy": "fsdp"}):
        ranks = 1 if settings["strategy"] == "local" else 4
        assert peak(tables, ranks, **settings).bytes == peak(plain, ranks, **settings).bytes + 777


# ---------------------------------------------------------------- the sum


def test_the_terms_are_the_sum():
    found = peak(two_layers(kept=5_000), 16, UNITS, strategy="fsdp-auto-wrap")
    assert found.rows() == [
        ("parameters: shards", "4 · 320 / 16", 80),
        ("optimizer: shards of two moments", "8 · 320 / 16", 160),
        ("unsharded: b", "4 · 160", 640),
        ("buffers: all-gather, a", "4 · 160", 640),
        ("buffers: gloo's copy, a", "4 · 160", 640),
        ("activations: kept and in flight", "measured", 10_000),
    ]
    assert sum(size for _, _, size in found.rows()) == found.bytes == sum(found.by_kind().values())
    assert tuple(found.by_kind()) == KINDS


def test_the_ledger_keeps_the_highest_sum():
    ledger = Ledger()
    term = Term(kind="gathered", name="a", values=10)
    ledger.hold("a", term)
    ledger.set_activations(5)
    ledger.free("a", "gathered", "a")
    ledger.free("a", "gathered", "a")  # gone already
    ledger.set_activations(44)
    assert ledger.peak.bytes == 45 and not ledger.holds("a", "gathered", "a")
    ledger.hold("a", term)
    ledger.hold("a", replace(term, values=1))  # in its place, not beside it
    assert ledger.peak.bytes == 84


def test_a_unit_without_parameters_is_an_error():
    with pytest.raises(ValueError, match="unit 'c' has no parameters"):
        peak(two_layers(), 2, ("a", "c"), strategy="fsdp-auto-wrap")


def test_a_parameter_belongs_to_the_innermost_unit_around_it():
    shapes = {"features.0.weight": (32, 9), "features.3.weight": (64, 9), "fc.weight": (5, 2), "fc1.weight": (3,)}
    profile = replace(two_layers(), shapes=shapes)
    units = make_units(profile, ["features", "features.0", "features.3", "fc"], 1)
    # `features` keeps nothing that its convolutions have not taken; `fc1` is not within `fc`
    assert {unit.label: unit.padded for unit in units.values()} == {
        "features.0": 288,
        "features.3": 576,
        "features": 0,
        "fc": 10,
        "root": 3,
    }
    assert next(iter(units)) == ""
