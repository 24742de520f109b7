"""`python -m fsdp_helpers plan`: its arguments, its table, its sentence. No torch."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdp_helpers.config import ACTIVATION_CHECKPOINTING, APIS, PRECISIONS, SHARDING, STRATEGIES
from fsdp_helpers.planning.advice import verdict
from fsdp_helpers.planning.models import NAMED_MODELS, Subject, named_subject
from fsdp_helpers.planning.plan import (
    CONTEXT_BYTES,
    LINK_BYTES_PER_S,
    NCCL_AND_FRAGMENTATION_BYTES,
    Cluster,
    Plan,
    Settings,
    make_plan,
)
from fsdp_helpers.quantities import GB, format_bytes, format_count, format_seconds

DEFAULT_BATCH = {"image": 8, "token": 8192}  # of one rank, in one forward and backward


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """The arguments of `plan`; those that `train` has too mean the same."""
    plan.add_argument("--model", choices=NAMED_MODELS, required=True)
    plan.add_argument("--world-size", type=int, metavar="N", required=True, help="ranks, each with a device of its own")
    plan.add_argument("--device-memory-gb", type=float, metavar="GB", required=True, help="of 10^9 bytes, of a device")
    plan.add_argument(
        "--strategy", choices=STRATEGIES, default="fsdp-auto-wrap", help="auto-wrap: a unit for each block"
    )
    plan.add_argument("--api", choices=APIS, default="fsdp2")
    plan.add_argument("--sharding", choices=SHARDING, default="full")
    plan.add_argument("--replicas", type=int, metavar="N", default=2, help="groups of ranks, for hybrid sharding")
    plan.add_argument("--precision", choices=PRECISIONS, default="fp32")
    plan.add_argument("--activation-checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none")
    batch = plan.add_mutually_exclusive_group()
    for item, usual in DEFAULT_BATCH.items():
        batch.add_argument(
            f"--{item}s", type=int, metavar="N", help=f"of one rank in one forward and backward (default: {usual})"
        )
    link, outside = round(LINK_BYTES_PER_S / GB), round((CONTEXT_BYTES + NCCL_AND_FRAGMENTATION_BYTES) / GB)
    rate = f"that a rank sends at (default: {link}, a link of {8 * link} Gbit/s)"
    plan.add_argument("--bandwidth-gb-s", type=float, metavar="GB", default=float(link), help=rate)
    plan.add_argument("--tflops", type=float, metavar="X", help="that a device reaches, 10^12 operations a second")
    allowance = f"for what is not counted: CUDA's context, NCCL, fragmentation (default: {outside})"
    plan.add_argument("--allowance-gb", type=float, metavar="GB", default=float(outside), help=allowance)
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan to FILE")


def read_plan(options: argparse.Namespace) -> tuple[Subject, Plan]:
    """The model and the plan that the arguments ask for. Raises ValueError for what cannot be."""
    subject = named_subject(options.model)
    settings = Settings(
        batch=_batch(options, subject),
        strategy=options.strategy,
        api=options.api,
        sharding=options.sharding,
        replicas=options.replicas,
        precision=options.precision,
        activation_checkpointing=options.activation_checkpointing,
    )
    cluster = Cluster(
        world_size=options.world_size,
        device_memory_bytes=options.device_memory_gb * GB,
        bandwidth_bytes_per_s=options.bandwidth_gb_s * GB,
        flops_per_s=None if options.tflops is None else options.tflops * 1e12,
        allowance_bytes=options.allowance_gb * GB,
    )
    return subject, make_plan(subject, settings, cluster)


def plan_command(options: argparse.Namespace, write_json: Callable[[dict, Path], None]) -> None:
    """Print the plan and its verdict; `write_json` writes the one that --json asks for."""
    subject, plan = read_plan(options)
    said = verdict(plan, subject)
    print("\n".join(plan_lines(plan)), "", said, sep="\n")
    if options.json:
        write_json(plan.to_json() | {"verdict": said}, options.json)


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan as lines of text: what is planned, bytes by category, and what a step sends and computes."""
    settings, cluster = plan.settings, plan.cluster
    yield (
        f"{plan.model}, {format_count(plan.num_params)} parameters, on {cluster.world_size:,} rank(s), "
        f"{settings.batch:,} {plan.item}(s) each"
    )
    api = f" ({settings.api}, {settings.sharding})" if settings.config().is_sharded else ""
    recomputed = f"activation checkpointing: {settings.activation_checkpointing}"
    yield f"{settings.strategy}{api}, {settings.precision}, {recomputed}"
    yield ""
    rows = plan.by_category() | {f"peak: {plan.peak.when}": plan.peak.bytes}
    rows |= {"outside the count": round(cluster.allowance_bytes)}
    if plan.host_bytes:
        rows |= {"in host memory": plan.host_bytes}
    for name, size in rows.items():
        yield f"  {name:<34}{format_bytes(size):>8}"
    yield ""
    yield from _speed_lines(plan)


def _speed_lines(plan: Plan) -> Iterator[str]:
    bandwidth = format_bytes(round(plan.cluster.bandwidth_bytes_per_s))
    yield (
        f"A rank sends {format_bytes(plan.sent_bytes)} in a step: {format_seconds(plan.communication_s)} at "
        f"{bandwidth}/s."
    )
    if plan.step_s is None:
        return
    shortest, longest = plan.step_s
    most, least = plan.items_per_s
    yield (
        f"Its arithmetic takes {format_seconds(plan.arithmetic_s)}; a step takes {format_seconds(shortest)} if all "
        f"communication hides behind it, {format_seconds(longest)} if none does: {most:,.0f} to {least:,.0f} "
        f"{plan.item}s/s over all ranks."
    )


def _batch(options: argparse.Namespace, subject: Subject) -> int:
    given = {item: getattr(options, f"{item}s") for item in DEFAULT_BATCH}
    (other,) = [item for item in DEFAULT_BATCH if item != subject.item]
    if given[other] is not None:
        raise ValueError(f"--{other}s: a batch of {subject.name} is counted in {subject.item}s; use --{subject.item}s")
    return DEFAULT_BATCH[subject.item] if given[subject.item] is None else given[subject.item]
