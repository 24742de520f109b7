"""What the small rank functions of the notebooks find."""

from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.teaching.lessons import probes


def on_two_ranks(worker, *args) -> list:
    return launch(worker, *args, world_size=2, device="cpu", timeout_s=240, progress=False)


def test_a_policy_casts_weights_and_autocast_casts_operations():
    found = {way: on_two_ranks(probes.dtypes_in_forward, way)[0] for way in ("policy", "norm apart", "autocast")}
    policy = {"weight": "bfloat16", "Linear": "bfloat16", "LayerNorm": "bfloat16", "loss": "bfloat16"}
    assert found["policy"] == policy | {"gradient": "float32"}
    assert found["norm apart"] == found["policy"] | {"LayerNorm": "float32", "loss": "float32"}
    assert found["autocast"]["weight"] == found["autocast"]["loss"] == found["autocast"]["gradient"] == "float32"
    assert found["autocast"]["Linear"] == "bfloat16"
