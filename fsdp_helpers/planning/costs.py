"""Calculate a run's costs: its GPU-hours, the size of its checkpoints, and how often to save one. No torch import."""

from dataclasses import dataclass
from math import sqrt

from fsdp_helpers.planning.plan import Plan

HOUR_S, MINUTE_S = 3600, 60
# The Llama 3 herd of models, arXiv:2407.21783, table 5: 419 unexpected interruptions in 54 days of 16,384 GPUs.
DEVICE_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
# The time from a failure to the next step: someone has to notice, and the job has to restart and load its checkpoint.
# We chose this number; set your own.
RESTART_S = 10 * MINUTE_S
LEFT_OUT = "saving, restarts, evaluation, waiting for data and for slow machines"


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """The size of a checkpoint, the time to save it, and how often to save one."""

    checkpoint_bytes: int
    save_s: float
    hours_between_failures: float  # of any device in the cluster
    every_s: float  # the time between two checkpoints
    lost_share: float  # the share of the time lost to saving, repeated work and restarts


def save_plan(
    plan: Plan,
    *,
    storage_bytes_per_s: float,
    device_hours_between_failures: float = DEVICE_HOURS_BETWEEN_FAILURES,
    restart_s: float = RESTART_S,
) -> SavePlan:
    """Return a plan for saving a checkpoint every sqrt(2 x time to save x time between failures).

    A checkpoint contains one copy of the parameters and moments. All nodes write at the same time, each at
    `storage_bytes_per_s`. Each failure also costs `restart_s`, the time until someone has noticed and all ranks are
    training again. Source: J. Young, *A first order approximation to the optimum checkpoint interval*, 1974.
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
        lost_share=save_s / every_s + (every_s / 2 + restart_s) / between_s,
    )


def device_hours(plan: Plan, items: float, goodput: float = 1.0) -> float:
    """Return the device-hours it takes to process `items`; `goodput` is the fraction of that time spent training.

    Raises ValueError if no rate is known, or if `goodput` isn't above 0 and at most 1.
    """
    if plan.items_per_s_estimate is None:
        raise ValueError("GPU-hours need a rate; name a --device, or give --tflops")
    if not 0 < goodput <= 1:
        raise ValueError(f"--goodput is {goodput}; it's a share of the time, so it must be above 0 and at most 1")
    return items / plan.items_per_s_estimate / HOUR_S * plan.cluster.world_size / goodput
