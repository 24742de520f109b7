"""One launch of the run that notebook 03 traces; and the trace that is kept, against arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_helpers.measuring.unit_trace import UnitHooks, read_unit_trace, unit_trace
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.planning.traffic import padded_params
from fsdp_helpers.records import Collective, StepTrace
from fsdp_helpers.teaching.lessons.traced_step import KEPT_RUN, KEPT_SHAPE, KEPT_TRACE, trace_step

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
P = 1_199_882  # ShallowNet


@pytest.fixture(scope="module")
def kept():
    return read_unit_trace(NOTEBOOKS / KEPT_TRACE)


def test_one_unit_is_gathered_and_reduced_once(tmp_path):
    step = trace_step(replace(KEPT_RUN, max_steps=2), device="cpu")
    assert [(unit.name, unit.full_bytes) for unit in step.units] == [("root", 4 * P)]
    for rank in step.ranks:
        (stay,) = rank.stays["root"]
        assert rank.trace.curve.held_bytes == pytest.approx(16 * P / 2, rel=1e-3)
        assert sum(made.bytes for made in rank.gradients) == 4 * P
        made_s = [made.time_s for made in rank.gradients]
        backward = rank.trace.curve.phases[1]
        assert 0 <= rank.zeroed_s < stay.gather.start_s < stay.gather.end_s < backward.start_s < min(made_s)
        assert max(made_s) < rank.reduces["root"].start_s < rank.reduces["root"].end_s < step.length_s
        assert rank.reduces["root"].bytes == 4 * P
    step.save(tmp_path / "step.json")
    again = read_unit_trace(tmp_path / "step.json")
    assert [unit.full_bytes for unit in again.units] == [4 * P]
    assert again.ranks[1].trace.curve.allocated_bytes == step.ranks[1].trace.curve.allocated_bytes
    assert again.length_s == pytest.approx(step.length_s, abs=1e-6)


def test_the_kept_trace_has_the_bytes_of_its_model(kept):
    with torch.device("meta"):
        model = ViT(KEPT_SHAPE)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for unit in kept.units[1:]:
        own = [shape for name, shape in shapes.items() if name.startswith(f"{unit.name}.")]
        assert unit.full_bytes == 4 * padded_params(own, 2)
    assert [unit.name for unit in kept.units] == ["root", *(f"blocks.{number}" for number in range(KEPT_SHAPE.depth))]
    whole = sum(unit.full_bytes for unit in kept.units)
    for rank in kept.ranks:
        curve = rank.trace.curve
        assert curve.held_bytes == pytest.approx(
            4 * whole / 2, rel=0.01
        )  # parameters, gradients, two moments: 16 P / N
        assert curve.peak_bytes < 5 * whole  # what DDP holds between steps, its buckets included
        assert {name: len(stays) for name, stays in rank.stays.items()} == {
            unit.name: 1 if unit.name == "root" else 2 for unit in kept.units
        }
        for unit in kept.units:
            assert {stay.gather.bytes for stay in rank.stays[unit.name]} == {unit.full_bytes}
            assert rank.reduces[unit.name].bytes == unit.full_bytes


def test_units_come_and_go_one_after_the_other(kept):
    for rank in kept.ranks:
        blocks = [rank.stays[unit.name] for unit in kept.units[1:]]
        forward, backward = ([stays[number] for stays in blocks] for number in (0, 1))
        assert all(before.freed_s <= after.gather.start_s for before, after in zip(forward, forward[1:], strict=False))
        # in backward the next one is gathered early: before the one ahead of it is freed
        assert all(after.freed_s <= before.freed_s for before, after in zip(backward, backward[1:], strict=False))


def test_ranks_that_gathered_different_bytes_are_refused(kept):
    first, second = kept.ranks
    stay = second.stays["root"][0]
    other = replace(second, stays={**second.stays, "root": (replace(stay, gather=replace(stay.gather, bytes=1)),)})
    with pytest.raises(ValueError, match="different units"):
        unit_trace("two", {}, [first, other])


def test_times_count_from_when_the_first_rank_began(kept):
    first, second = kept.ranks
    later = replace(second, trace=replace(second.trace, began_s=first.trace.began_s + 1.0))

    def times_s(rank) -> list[float]:
        stays = [time_s for stay in rank.stays["root"] for time_s in (stay.gather.start_s, stay.freed_s)]
        return [rank.zeroed_s, rank.gradients[0].time_s, rank.reduces["root"].end_s, *stays]

    assert times_s(unit_trace("two", {}, [first, later]).ranks[1]) == pytest.approx([1 + at for at in times_s(second)])


def test_a_unit_gathered_again_stays_until_it_is_reduced(kept):
    hooks = UnitHooks(torch.nn.Linear(2, 2))  # nothing of it is sharded
    hooks.begin_step()
    hooks._left = {"root": (0.0, False), "inner": (1.0, True)}
    gathered = Collective(op="all_gather", bytes=8, sent_bytes=0, start_s=0, end_s=0, unit="root")
    reduced = replace(gathered, op="reduce_scatter", start_s=3)
    units = (gathered, replace(gathered, unit="inner"), replace(gathered, unit="inner"))
    trace = StepTrace(curve=kept.ranks[0].trace.curve, collectives=(*units, replace(reduced, unit="inner"), reduced))
    stays = hooks.seen_with(trace).stays
    assert {name: [stay.freed_s for stay in found] for name, found in stays.items()} == {"root": [3], "inner": [1, 3]}
