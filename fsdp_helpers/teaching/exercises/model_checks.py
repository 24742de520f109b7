"""Checkers of notebook 08's small exercises, as those in `checks`."""

from collections.abc import Callable
from dataclasses import asdict
from random import SystemRandom

import torch

from fsdp_helpers.models import count_params
from fsdp_helpers.shapes import VIT_SHAPES, ViTShape
from fsdp_helpers.teaching.exercises.answers import call, call_or_none, exercise, expect, expect_whole
from fsdp_helpers.vit import ViT

FRESH_CASES = 5
DRAW = SystemRandom()


@exercise("08")
def check_vit_parameters(vit_parameters: Callable[..., int] | None) -> str:
    """Notebook 08: the parameters of a ViT, from the nine numbers of its shape."""
    for shape in [*VIT_SHAPES.values(), *(_fresh_shape() for _ in range(FRESH_CASES))]:
        with torch.device("meta"):
            right = count_params(ViT(shape))
        given = call(vit_parameters, **asdict(shape))
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
def check_fewest_ranks(fewest_ranks: Callable[[list[int], int], int | None] | None) -> str:
    """Notebook 08: the fewest ranks that can start a model on meta, layer by layer; None if no number of them can.

    `layers` are parameters, a tensor each, and a device has room for `device_bytes`. Slices are counted unrounded.
    """
    for layers, device_bytes in _starts():
        given = call_or_none(fewest_ranks, layers, device_bytes)
        says = f"for layers of {layers} parameters and devices of {device_bytes:,} bytes your function says {given}; "
        if given is None:
            # A million ranks keep next to nothing of each layer.
            expect(not _starts_on(10**6, layers, device_bytes), f"{says}with enough ranks, it does fit")
            continue
        expect_whole(given)
        expect(given >= 1, f"{says}there is at least one rank")
        expect(_starts_on(given, layers, device_bytes), f"{says}their start needs more than that at its peak")
        fewer = given > 1 and _starts_on(given - 1, layers, device_bytes)
        expect(not fewer, f"{says}fewer ranks can start it, too")
    return "Right: ranks shrink the slices, and the largest layer has to fit as a whole."


def _starts() -> list[tuple[list[int], int]]:
    """Layers and bytes of a device: edges with known outcomes, then fresh ones, of which some never fit."""
    # 4 bytes x (1,000 / N + 1,000 + 1,000 / N): 12,000 on one rank, 8,000 on two, more than 4,000 on any number
    cases = [([1_000], 12_000), ([1_000], 11_999), ([1_000], 8_000), ([1_000], 4_000), ([64] * 10, 10**9)]
    for _ in range(FRESH_CASES):
        layers = [DRAW.randint(1_000, 10**8) for _ in range(DRAW.randint(2, 12))]
        largest_bytes = 4 * max(layers)
        cases += [
            (layers, largest_bytes + DRAW.randint(largest_bytes // 9, 9 * largest_bytes)),
            (layers, largest_bytes),
        ]
    return cases


def _starts_on(world_size: int, layers: list[int], device_bytes: int) -> bool:
    """Slices of all layers, the largest layer whole, and a copy of its slice; in integers, exact where it is full."""
    return 4 * (sum(layers) + max(layers)) + 4 * max(layers) * world_size <= device_bytes * world_size
