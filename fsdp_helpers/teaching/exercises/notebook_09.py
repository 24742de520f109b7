"""Check a reader's planner against ours on random clusters, and against a run on one real rank."""

from collections.abc import Callable
from random import SystemRandom
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.rank_of_n import measure_own_rank_of_n
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.planning.models import Subject, named_subject
from fsdp_helpers.planning.plan import Cluster, Settings, make_plan
from fsdp_helpers.progress import with_progress
from fsdp_helpers.quantities import GB, format_bytes
from fsdp_helpers.teaching.exercises.answers import call_or_none, exercise, expect, expect_whole_number
from fsdp_helpers.teaching.exercises.on_ranks import read_module

ASKED = ("vit-b16", "vit-l16", "vit-10b")
DEVICES_GB = (16, 24, 40, 48, 80, 96, 141)
LEVERS = {"strategy": "fsdp-auto-wrap", "activation_checkpointing": "units"}
SMALL, SMALL_RANKS, SMALL_GB = "vit-mnist", 64, 0.02
TOLERANCE = 0.03  # between the formulas and what a rank allocates


@exercise("09")
def check_batch(module: str = "my_batch", num_cases: int = 6) -> str:
    """Notebook 09: check `largest_batch(model, world_size, device_gb, allowance_gb)`, in images per rank.

    It returns None if not even one image fits. The model trains with FSDP2 in fp32, with a unit per block and every
    block recomputed. At the end, one real rank trains with the reader's batch size on a very small device.
    """
    largest_batch = read_module(module, "largest_batch", with_package=True)
    cases = _cases(num_cases)
    for case in with_progress(cases, f"{module}.py, clusters"):
        _check_case(largest_batch, case)
    small = {"model": SMALL, "world_size": SMALL_RANKS, "device_gb": SMALL_GB, "allowance_gb": 0}
    images = _check_case(largest_batch, small)
    peak_bytes = small_rank_peak(images)
    expect(
        peak_bytes <= (1 + TOLERANCE) * SMALL_GB * GB,
        f"with your {images} images, one real rank out of {SMALL_RANKS} peaks at {format_bytes(peak_bytes)}, "
        f"above the limit of {format_bytes(round(SMALL_GB * GB))}",
    )
    return (
        f"Right on every cluster; with your {images} images, one real rank out of {SMALL_RANKS} peaks at "
        f"{format_bytes(peak_bytes)}, and the limit is {format_bytes(round(SMALL_GB * GB))}."
    )


def _cases(num_cases: int) -> list[dict[str, Any]]:
    """Return random clusters, plus one on which not even one image fits."""
    draw = SystemRandom().choice
    cases = [
        {
            "model": draw(ASKED),
            "world_size": draw((8, 16, 64, 256, 1024)),
            "device_gb": draw(DEVICES_GB),
            "allowance_gb": draw((2, 3, 4, 6)),
        }
        for _ in range(num_cases)
    ]
    return [*cases, {"model": "vit-10b", "world_size": 8, "device_gb": 16, "allowance_gb": 4}]


def _check_case(largest_batch: Callable, case: dict[str, Any]) -> int | None:
    """Return the reader's batch size; raise NotYet unless it fits and a batch with one more image doesn't."""
    given = call_or_none(largest_batch, *case.values())
    says = f"for {', '.join(f'{name}={value}' for name, value in case.items())}, your function returns {given}; "
    subject = named_subject(case["model"])
    if given is None:
        expect(_spare(subject, 1, case) < 0, f"{says}one image on each rank fits")
        return None
    expect_whole_number(given)
    expect(given >= 1, f"{says}if not even one image fits, the answer is None")
    spare = _spare(subject, int(given), case)
    expect(spare >= 0, f"{says}that's {format_bytes(-round(spare))} too much, including the allowance")
    expect(_spare(subject, int(given) + 1, case) < 0, f"{says}one more image also fits")
    return int(given)


def _spare(subject: Subject, images: int, case: dict[str, Any]) -> float:
    """Return the bytes left over on a device with this many images per rank."""
    cluster = Cluster(
        world_size=case["world_size"],
        device_memory_bytes=case["device_gb"] * GB,
        allowance_bytes=case["allowance_gb"] * GB,
    )
    return make_plan(subject, Settings(batch=images, **LEVERS), cluster).spare_bytes


def small_rank_peak(num_images: int) -> int:
    """Return the peak bytes on one real rank out of SMALL_RANKS while it trains the small transformer."""
    images, labels = torch.randn(num_images, 1, 28, 28), torch.zeros(num_images, dtype=torch.long)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    return measure_own_rank_of_n(
        lambda: ViT(VIT_SHAPES[SMALL]), loss_of, TrainConfig(**LEVERS), SMALL_RANKS, named_subject(SMALL).units
    ).peak_bytes
