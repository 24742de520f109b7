"""Two tools' formulas, worked by hand."""

from fsdp_helpers.planning.other_tools import accelerate_bytes, deepspeed_zero3_bytes, largest_layer_params
from fsdp_helpers.planning.profile import StepProfile

# Layers of 40 + 4 and 12 parameters, and 5 that belong to the model itself
PROFILE = StepProfile(shapes={"a.0.weight": (4, 10), "a.0.bias": (4,), "a.1.weight": (12,), "free": (5,)}, moments=())


def test_hand_worked():
    assert largest_layer_params(PROFILE) == 44
    assert accelerate_bytes(PROFILE) == 16 * 61
    assert accelerate_bytes(PROFILE, "bf16") == 8 * 61
    assert deepspeed_zero3_bytes(PROFILE, 1) == 4 * 44 + 18 * 61
    assert deepspeed_zero3_bytes(PROFILE, 64) == 4 * 44 + 17  # 1,098 / 64 = 17.2


def test_published_examples():
    # accelerate's page on a model of 1,218,863,008 bytes in fp32: 4,875,452,032 for a step, in bf16 2,437,726,016
    large = StepProfile(shapes={"w": (1_218_863_008 // 4,)}, moments=())
    assert (accelerate_bytes(large), accelerate_bytes(large, "bf16")) == (4_875_452_032, 2_437_726_016)
