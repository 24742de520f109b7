"""Checkers of notebook 08's small exercises, as those in `checks`."""

from collections.abc import Callable
from dataclasses import asdict
from random import SystemRandom

import torch

from fsdp_helpers.models import count_params
from fsdp_helpers.shapes import VIT_SHAPES, ViTShape
from fsdp_helpers.teaching.answers import call, exercise, expect, expect_number, expect_whole
from fsdp_helpers.vit import ViT

FRESH_CASES = 5
DRAW = SystemRandom()


@exercise("08")
def check_vit_parameters(vit_parameters: Callable[..., int] | None) -> str:
    """Notebook 08: the parameters of a ViT, from the nine numbers of its shape."""
    for shape in [*VIT_SHAPES.values(), *(_fresh_shape() for _ in range(FRESH_CASES))]:
        with torch.device("meta"):
            right = count_params(ViT(shape))
        given = call(
            lambda shape=shape: vit_parameters(**asdict(shape)) if callable(vit_parameters) else vit_parameters
        )
        expect_whole(given)
        says = (
            f"for {', '.join(f'{name}={value}' for name, value in asdict(shape).items())} your function says {given:,}"
        )
        expect(given == right, f"{says}; the model that is built of it has {'more' if given < right else 'fewer'}")
    return "Right: every shape, up to ten billion parameters."


def _fresh_shape() -> ViTShape:
    patch_size, num_heads = DRAW.randint(2, 16), DRAW.randint(1, 8)
    return ViTShape(
        image_size=patch_size * DRAW.randint(1, 9),
        channels=DRAW.randint(1, 4),
        patch_size=patch_size,
        width=num_heads * DRAW.randint(2, 40),
        depth=DRAW.randint(1, 9),
        num_heads=num_heads,
        mlp_width=DRAW.randint(3, 500),
        num_classes=DRAW.randint(2, 50),
        class_token=DRAW.random() < 0.5,
    )


@exercise("08")
def check_start_peak(start_peak_bytes: Callable[[list[int], int], float] | None) -> str:
    """Notebook 08: the most bytes of a start on meta, layer by layer, from the sizes of the layers, a tensor each."""
    cases = [([1_000], 1), ([1_000, 3_000, 2_000], 2), ([64] * 10, 64)]
    for _ in range(FRESH_CASES):
        world_size = DRAW.randint(2, 64)
        cases.append(([world_size * DRAW.randint(1, 10**6) for _ in range(DRAW.randint(2, 12))], world_size))
    for layers, world_size in cases:
        given = call(start_peak_bytes, layers, world_size)
        expect_number(given)
        right = 4 * (sum(layers) // world_size + max(layers) + max(layers) // world_size)
        says = f"for layers of {layers} parameters and {world_size} rank(s) your function says {given:,.0f} bytes"
        expect(
            abs(given - right) <= 1e-9 * right, f"{says}; which slices are there all the time, and what comes on top?"
        )
    return "Right: the slices of all layers, one layer whole, and a copy of its slice."
