"""What the small rank functions of the notebooks find."""

from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.teaching.lessons import probes


def on_two_ranks(worker, *args) -> list:
    return launch(worker, *args, world_size=2, device="cpu", timeout_s=240, progress=False)


def test_an_optimizer_built_before_sharding_moves_nothing():
    before, after = (on_two_ranks(probes.losses_when_built, when)[0] for when in ("before", "after"))
    assert len(set(before)) == 1  # no error, and no step
    assert after[0] == before[0] and after == sorted(after, reverse=True) and len(set(after)) == 4
