"""The fewest ranks that fit, with a plan that fits from a known number on."""

from types import SimpleNamespace

import pytest

from fsdp_helpers.planning import sweep
from fsdp_helpers.planning.cluster import Cluster


@pytest.mark.parametrize(
    "fewest, found", [(1, 1), (2, 2), (3, 3), (64, 64), (69, 69), (2**14, 2**14), (2**14 + 1, None)]
)
def test_the_fewest_ranks_that_fit_are_no_power_of_two(fewest, found, monkeypatch):
    def make_plan(subject, settings, cluster: Cluster) -> SimpleNamespace:
        return SimpleNamespace(fits=cluster.world_size >= fewest)

    monkeypatch.setattr(sweep, "make_plan", make_plan)
    assert sweep.fewest_that_fit(None, None, Cluster(world_size=8, device_memory_bytes=80e9)) == found
