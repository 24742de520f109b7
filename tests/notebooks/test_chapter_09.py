"""What 09 says of its plans and of its saved measurements."""

from statistics import median

import pytest
from chapters import NOTEBOOKS

from fsdp_helpers.measuring.prediction_errors import read_errors
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.planning.sweep import fewest_that_fit

FAST = {"precision": "bf16", "activation_checkpointing": "units"}
LINK = {"bandwidth_bytes_per_s": 50e9, "flops_per_s": 400e12}


def large_plan(model: str, batch: int, ranks: int, device_gb: float = 80) -> Plan:
    cluster = Cluster(world_size=ranks, device_memory_bytes=device_gb * 1e9, **LINK)
    return make_plan(model, Settings(batch=batch, **FAST), cluster)


def test_the_saved_predictions_are_within_a_percent_but_for_four_runs():
    zoo = read_errors(str(NOTEBOOKS / "reference/zoo.json"))
    errors = read_errors(str(NOTEBOOKS / "reference/planning-errors.json")) + zoo
    sizes = [abs(row.error) for row in errors]
    assert median(sizes) <= 0.01 and sum(size > 0.01 for size in sizes) == 4
    assert len({row.model for row in zoo}) == 19 and max(abs(row.error) for row in zoo) <= 0.012
    assert all(abs(row.error) < 0.005 for row in zoo if row.variant == "bf16")


@pytest.mark.parametrize("model, batch, device_gb, fewest", [("llama-70b", 8192, 80, 18), ("llama-70b", 8192, 40, 69)])
def test_the_fewest_ranks_fit_and_one_less_does_not(model, batch, device_gb, fewest):
    memory = Cluster(world_size=64, device_memory_bytes=device_gb * 1e9, **LINK)
    assert fewest_that_fit(model, Settings(batch=batch, **FAST), memory) == fewest
    assert large_plan(model, batch, fewest, device_gb).fits and not large_plan(model, batch, fewest - 1, device_gb).fits


def test_llama_70b_never_fits_on_24_gb():
    memory = Cluster(world_size=64, device_memory_bytes=24e9, **LINK)
    assert fewest_that_fit("llama-70b", Settings(batch=8192, **FAST), memory) is None


def test_one_unit_sends_what_ddp_sends_but_for_padding():
    cluster = Cluster(world_size=64, device_memory_bytes=80e9, **LINK)
    ddp, one_unit = (make_plan("vit-l16", Settings(batch=8, strategy=name), cluster) for name in ("ddp", "fsdp"))
    assert ddp.sent_bytes == pytest.approx(one_unit.sent_bytes, rel=0.05)


def test_padding_makes_more_ranks_need_more_memory():
    needs = [large_plan("vit-10b", 8, ranks).needed_bytes for ranks in (256, 1024)]
    assert needs[0] < needs[1]
