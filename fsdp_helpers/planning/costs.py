"""The costs of a run: GPU-hours, the size of its checkpoints, and how often to save one. No torch."""

from dataclasses import dataclass
from math import sqrt

from fsdp_helpers.planning.plan import Plan

HOUR_S = 3600
# The Llama 3 herd of models, arXiv:2407.21783, table 5: 419 unexpected interruptions in 54 days of 16,384 GPUs.
DEVICE_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
STORAGE_BYTES_PER_S = 2e9  # that a node writes at: a choice, to be replaced by what yours does


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """A checkpoint's size, the time it takes, and how often it pays."""

    checkpoint_bytes: int
    save_s: float
    hours_between_failures: float  # of all devices together
    every_s: float
    lost_share: float  # of the time, to saving and to work that is done twice


def save_plan(
    plan: Plan,
    *,
    device_hours_between_failures: float = DEVICE_HOURS_BETWEEN_FAILURES,
    storage_bytes_per_s: float = STORAGE_BYTES_PER_S,
) -> SavePlan:
    """Return when to save: after the square root of twice the time to save times the time between failures.

    A checkpoint has parameters and moments, each once, and all nodes write at the same time.
    Source: J. Young, *A first order approximation to the optimum checkpoint interval*, 1974.
    """
    nodes = -(-plan.cluster.world_size // plan.cluster.ranks_per_node)
    save_s = plan.checkpoint_bytes / (storage_bytes_per_s * nodes)
    between_s = HOUR_S * device_hours_between_failures / plan.cluster.world_size
    every_s = sqrt(2 * save_s * between_s)
    return SavePlan(
        checkpoint_bytes=plan.checkpoint_bytes,
        save_s=save_s,
        hours_between_failures=between_s / HOUR_S,
        every_s=every_s,
        lost_share=save_s / every_s + every_s / 2 / between_s,
    )


def device_hours(plan: Plan, items: float) -> float:
    """Return the hours of all devices together for a number of items. Raises ValueError if no rate is known."""
    if plan.items_per_s_estimate is None:
        raise ValueError("GPU-hours need a rate; name a --device, or give --tflops")
    return items / plan.items_per_s_estimate / HOUR_S * plan.cluster.world_size
