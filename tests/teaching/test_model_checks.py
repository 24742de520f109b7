"""The small exercises of notebook 08: right answers pass, plausible wrong ones do not."""

import pytest

from fsdp_helpers.teaching import model_checks
from fsdp_helpers.teaching.answers import NotYet


def vit_parameters(image_size, channels, patch_size, width, depth, num_heads, mlp_width, num_classes, class_token):
    tokens = (image_size // patch_size) ** 2 + class_token
    attention = 4 * width * width + 4 * width
    hidden = 2 * width * mlp_width + mlp_width + width
    patches = channels * patch_size**2 * width + width
    rest = tokens * width + class_token * width + 2 * width + width * num_classes + num_classes
    return patches + depth * (4 * width + attention + hidden) + rest


def start_peak_bytes(layers, world_size):
    return 4 * (sum(layers) // world_size + max(layers) + max(layers) // world_size)


def test_right_answers():
    assert model_checks.check_vit_parameters(vit_parameters).startswith("Right")
    assert model_checks.check_start_peak(start_peak_bytes).startswith("Right")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        lambda **shape: ...,
        lambda **shape: 204_938,  # of the first shape alone
        lambda **shape: vit_parameters(**shape) - shape["width"],  # a bias less
        lambda **shape: vit_parameters(**shape | {"class_token": False}),
        lambda **shape: vit_parameters(**shape | {"mlp_width": 4 * shape["width"]}),
        lambda **shape: str(vit_parameters(**shape)),
    ],
)
def test_wrong_counts(answer):
    with pytest.raises(NotYet) as refused:
        model_checks.check_vit_parameters(answer)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "answer",
    [
        None,
        lambda layers, world_size: ...,
        lambda layers, world_size: 4 * sum(layers) // world_size,  # the slices alone
        lambda layers, world_size: 4 * (sum(layers) // world_size + max(layers)),  # without the copy
        lambda layers, world_size: 4 * sum(layers),  # whole
        lambda layers, world_size: start_peak_bytes(layers, world_size) // 4,  # parameters, no bytes
    ],
)
def test_wrong_peaks(answer):
    with pytest.raises(NotYet) as refused:
        model_checks.check_start_peak(answer)
    assert len(str(refused.value).splitlines()) == 1
