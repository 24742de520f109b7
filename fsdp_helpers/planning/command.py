"""`python -m fsdp_helpers plan`: its table, its sentences. No torch."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from fsdp_helpers.planning.advice import fastest, verdict
from fsdp_helpers.planning.arguments import read_plan
from fsdp_helpers.planning.costs import HOUR_S, SavePlan, device_hours, save_plan
from fsdp_helpers.planning.devices import TYPICAL_RANGE, named_device
from fsdp_helpers.planning.optimizers import OPTIMIZERS
from fsdp_helpers.planning.plan import Plan
from fsdp_helpers.quantities import GB, format_bytes, format_count, format_seconds

DAY_S = 24 * HOUR_S


def plan_command(options: argparse.Namespace, write_json: Callable[[dict, Path], None]) -> None:
    """Print the plan and its verdict; `write_json` writes the one that --json asks for."""
    subject, plan = read_plan(options)
    for name in ("hours_between_failures", "storage_gb_s", "total"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be a number above zero")
    saving = save_plan(
        plan,
        device_hours_between_failures=options.hours_between_failures,
        storage_bytes_per_s=options.storage_gb_s * GB,
    )
    said, best = verdict(plan, subject), fastest(plan, subject)
    hours = device_hours(plan, options.total) if options.total else None
    lines = [*plan_lines(plan), *_cost_lines(plan, saving, options.total, hours), "", said]
    print("\n".join([*lines, *_fastest_lines(plan, best)]))
    if options.json:
        costs = {"saving": asdict(saving), "device_hours": hours, "fastest": best.to_json() if best else None}
        write_json(plan.to_json() | costs | {"verdict": said}, options.json)


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as lines of text: what is planned, bytes by category, and what a step sends and computes."""
    settings, cluster = plan.settings, plan.cluster
    yield (
        f"{plan.model}, {format_count(plan.num_params)} parameters, on {cluster.world_size:,} rank(s), "
        f"{settings.batch:,} {plan.item}(s) each"
    )
    api = f" ({settings.api}, {settings.sharding})" if settings.config().is_sharded else ""
    recomputed = f"activation checkpointing: {settings.activation_checkpointing}"
    parts = f", {settings.micro_batches} micro-batches" if settings.micro_batches > 1 else ""
    optimizer = f", {OPTIMIZERS[settings.optimizer].title}" if settings.optimizer != "adam" else ""
    yield f"{settings.strategy}{api}, {settings.precision}, {recomputed}{parts}{optimizer}"
    yield ""
    rows = plan.by_category() | {f"peak: {plan.peak.when}": plan.peak.bytes}
    rows |= {"outside the count": round(cluster.allowance_bytes)}
    if plan.host_bytes:
        rows |= {"in host memory, for each rank": plan.host_bytes}
        rows |= {f"in host memory, of a node of {cluster.node_ranks:,}": plan.node_host_bytes}
    width = max(34, *(len(name) + 1 for name in rows))
    for name, size in rows.items():
        yield f"  {name:<{width}}{format_bytes(size):>8}"
    if plan.host_bytes and cluster.node_ranks == 1 < cluster.world_size:
        yield "Ranks of one node share its memory: say how many with --ranks-per-node."
    yield ""
    yield from _speed_lines(plan)


def _speed_lines(plan: Plan) -> Iterator[str]:
    cluster = plan.cluster
    rate = f"{format_bytes(round(cluster.bandwidth_bytes_per_s))}/s"
    if cluster.ranks_per_node > 1:
        within = cluster.within_bytes_per_s or cluster.bandwidth_bytes_per_s
        rate = f"{format_bytes(round(within))}/s within nodes of {cluster.ranks_per_node} and {rate} between them"
    yield (f"A rank sends {format_bytes(plan.sent_bytes)} in a step: {format_seconds(plan.communication_s)} at {rate}.")
    if plan.time is None:
        return
    time, (most, least) = plan.time, plan.items_per_s
    shortest, longest = (format_seconds(bound) for bound in plan.step_s)
    update = f"the optimizer {format_seconds(time.optimizer_s)}" if time.optimizer_s else "the optimizer not counted"
    yield (
        f"A step takes {format_seconds(time.estimate_s)}: arithmetic {format_seconds(time.arithmetic_s)}, waiting "
        f"{format_seconds(time.exposed_s)}, {update}."
    )
    if not time.optimizer_s:
        yield "An update takes as long as memory needs to read the state, and --device says how fast that is."
    yield f"Between {shortest} and {longest}: {_reason(plan)}."
    speed = plan.items_per_s_estimate
    mfu = f", {plan.mfu:.0%} MFU" if plan.mfu else ""
    yield (
        f"{speed:,.0f} {plan.item}s/s over all ranks ({least:,.0f} to {most:,.0f}), "
        f"{speed / cluster.world_size:,.0f} per rank, {speed * DAY_S:.3g} a day{mfu}."
    )


def _reason(plan: Plan) -> str:
    """Explain the range of a step."""
    if plan.cluster.device is None:
        return f"with all communication hidden behind arithmetic; with none, and rates {TYPICAL_RANGE:.0%} below"
    device = named_device(plan.cluster.device)
    if device.measured:
        return f"published runs on {device.title} lie {TYPICAL_RANGE:.0%} to either side"
    return f"no published run gives the share that {device.title} reaches; it is that of its nearest relative"


def _cost_lines(plan: Plan, saving: SavePlan, total: float | None, hours: float | None) -> Iterator[str]:
    yield (
        f"A checkpoint has {format_bytes(saving.checkpoint_bytes)} and takes {format_seconds(saving.save_s)}; with a "
        f"failure every {format_seconds(HOUR_S * saving.hours_between_failures)}, save every "
        f"{format_seconds(saving.every_s)} and lose {saving.lost_share:.1%} of the time."
    )
    if hours is not None:
        yield f"{total:.3g} {plan.item}s take {hours:,.0f} GPU-hours, {hours / plan.cluster.world_size / 24:,.1f} days."


def _fastest_lines(plan: Plan, best: Plan | None) -> Iterator[str]:
    """Say what is fastest on the same cluster, if it is something else."""
    if best is None:
        return
    if best.settings == plan.settings:
        yield "Nothing that was tried is faster."
        return
    settings = best.settings
    yield (
        f"Fastest of what was tried: {settings.batch:,} {plan.item}s on each rank, sharding {settings.sharding}, "
        f"activation checkpointing {settings.activation_checkpointing}: {best.items_per_s_estimate:,.0f} "
        f"{plan.item}s/s, peak {format_bytes(best.peak.bytes)}."
    )
