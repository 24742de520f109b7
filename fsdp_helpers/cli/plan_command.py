"""`python -m fsdp_helpers plan`: its arguments, table and sentences. No torch import.

The flags for training and for the cluster come from `Settings` and `Cluster`.
"""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from fsdp_helpers.cli.flags import Flag, add_flags, flags, given_settings
from fsdp_helpers.cli.printing import write_json
from fsdp_helpers.config import require_positive_int
from fsdp_helpers.models.shapes import LLAMA_SHAPES
from fsdp_helpers.planning.advice import CHAPTER, changes_until_it_fits, fastest, reducing_once, sentence
from fsdp_helpers.planning.cluster import Cluster
from fsdp_helpers.planning.costs import (
    DEVICE_HOURS_BETWEEN_FAILURES,
    HOUR_S,
    LEFT_OUT,
    MINUTE_S,
    RESTART_S,
    SavePlan,
    device_hours,
    save_plan,
)
from fsdp_helpers.planning.devices import TYPICAL_RANGE, named_device
from fsdp_helpers.planning.hugging_face import read_config
from fsdp_helpers.planning.models import NAMED_MODELS, Subject, llama_subject, named_subject
from fsdp_helpers.planning.optimizers import OPTIMIZERS
from fsdp_helpers.planning.plan import Plan, Settings, make_plan
from fsdp_helpers.planning.step_time import LAUNCH_BOUND_S
from fsdp_helpers.planning.sweep import CONTEXTS, DAY_HOURS, Row, days_of, fewest_ranks, powers_of_two, sweep
from fsdp_helpers.quantities import GB, format_bytes, format_count, format_seconds

DAY_S = DAY_HOURS * HOUR_S
DEFAULT_BATCH = {"image": 8, "token": 8192}  # items per rank in one forward and backward
# Llama 3 405B was trained with 4 to 16 million tokens per step, DeepSeek-V3 with 12.6 to 62.9. Few runs exceed 16.
LARGE_STEP = 16e6
TRAINING_FLAGS = tuple(replace(row, default=None) if row.setting == "precision" else row for row in flags(Settings))
CLUSTER_FLAGS = tuple(
    replace(row, kind=float if row.kind is not str and row.setting != "ranks_per_node" else row.kind, default=None)
    for row in flags(Cluster)
)
BATCH_FLAGS = tuple(
    Flag(setting=f"{item}s", kind=int, meaning=f"{item}s per rank in one forward and backward pass (default: {usual})")
    for item, usual in DEFAULT_BATCH.items()
)
COST_FLAGS = (
    Flag(
        setting="total",
        kind=float,
        meaning="tokens or images in the whole run, to compute GPU-hours (for example 2e12)",
    ),
    Flag(
        setting="goodput",
        kind=float,
        meaning=f"share of the time spent training, for the GPU-hours; the rest is {LEFT_OUT} (default: 1)",
    ),
    Flag(
        setting="storage_gb_s",
        kind=float,
        meaning="rate at which a node writes a checkpoint, to work out how often to save",
    ),
    Flag(
        setting="hours_between_failures",
        kind=float,
        default=round(DEVICE_HOURS_BETWEEN_FAILURES),
        meaning="mean time between failures of one device; the default is from the Llama 3 paper",
    ),
    Flag(
        setting="restart_minutes",
        kind=float,
        default=RESTART_S / MINUTE_S,
        meaning="time from a failure until all ranks are training again",
    ),
    Flag(setting="days", kind=float, meaning="with --sweep and --total: find the fewest GPUs that finish in N days"),
)


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`. The ones that `train` also accepts mean the same thing there."""
    group = plan.add_argument_group("the model")
    kind = group.add_mutually_exclusive_group(required=True)
    kind.add_argument("--model", choices=NAMED_MODELS, help="a model known by name")
    kind.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the config.json of a Hugging Face model: a Llama, or most models derived from it",
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens per sequence")
    group.add_argument(
        "--lora-rank",
        type=int,
        metavar="N",
        help="train only LoRA adapters of rank N, one for each matrix in the blocks",
    )
    group = plan.add_argument_group("the training")
    add_flags(group, TRAINING_FLAGS)
    add_flags(group.add_mutually_exclusive_group(), BATCH_FLAGS)
    group.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="tokens or images per step, across all ranks; sets --micro-batches accordingly",
    )
    group = plan.add_argument_group("the cluster")
    group.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        required=True,
        help="number of ranks, one per device; with --sweep, the largest number to try",
    )
    add_flags(group, sorted(CLUSTER_FLAGS, key=lambda row: row.setting != "device"))
    group = plan.add_argument_group("the run")
    add_flags(group, COST_FLAGS)
    group.add_argument(
        "--sweep",
        action="store_true",
        help="print a table instead: the fastest plan that fits, for each number of ranks and sequence length",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the plan to FILE")


# ---------------------------------------------------------------- from arguments to a plan


def read_plan(options: argparse.Namespace) -> tuple[Subject, Plan]:
    """Return the model and its plan. Raises ValueError for impossible arguments."""
    subject = read_subject(options)
    settings = read_settings(options, subject)
    return subject, make_plan(subject, settings, read_cluster(options, settings.precision))


def read_settings(options: argparse.Namespace, subject: Subject) -> Settings:
    """Return the settings, with micro-batches from --global-batch if it's given. Raises ValueError for bad ones."""
    has_bf16 = options.device and "bf16" in named_device(options.device).peak_flops and not subject.refused("bf16")
    given = {"precision": "bf16" if has_bf16 else "fp32"} | given_settings(vars(options), TRAINING_FLAGS)
    settings = Settings(batch=_batch(options, subject), **given)
    if options.global_batch is None:
        return settings
    require_positive_int("global_batch", options.global_batch)
    if settings.micro_batches > 1:
        raise ValueError("--global-batch chooses the number of micro-batches; leave out --micro-batches")
    together = settings.batch * options.world_size
    if options.global_batch % together:
        raise ValueError(
            f"--global-batch is {options.global_batch:,}, but {options.world_size:,} ranks with {settings.batch:,} "
            f"{subject.item}s each make {together:,}; use a multiple of that, or change the {subject.item}s per rank"
        )
    return replace(settings, micro_batches=options.global_batch // together)


def read_subject(options: argparse.Namespace) -> Subject:
    """Return the model that is given by name or by config file. Raises ValueError for one that can't be planned."""
    if options.model and options.model not in LLAMA_SHAPES:
        for flag, given in {
            "context": options.context,
            "loss-chunks": options.loss_chunks > 1,
            "lora-rank": options.lora_rank,
        }.items():
            if given:
                raise ValueError(f"--{flag} is only for language models; leave it out")
        return named_subject(options.model)
    name, shape = read_config(options.config) if options.config else (options.model, LLAMA_SHAPES[options.model])
    if options.context is not None:
        require_positive_int("context", options.context)
        if shape.positions and options.context > shape.positions:
            raise ValueError(f"--context is {options.context:,}; {name} has only {shape.positions:,} learned positions")
        shape = replace(shape, context=options.context)
    if options.lora_rank is not None:
        require_positive_int("lora_rank", options.lora_rank)
    return llama_subject(name, shape, lora_rank=options.lora_rank or 0)


def read_cluster(options: argparse.Namespace, precision: str, world_size: int | None = None) -> Cluster:
    """Return the cluster; numbers given as flags override the device's defaults."""
    given = given_settings(vars(options), CLUSTER_FLAGS)
    ranks = options.world_size if world_size is None else world_size
    device = given.pop("device", None)
    return Cluster.of(device, ranks, precision, **given) if device else Cluster(world_size=ranks, **given)


def _batch(options: argparse.Namespace, subject: Subject) -> int:
    given = {item: getattr(options, f"{item}s") for item in DEFAULT_BATCH}
    (other,) = [item for item in DEFAULT_BATCH if item != subject.item]
    if given[other] is not None:
        raise ValueError(f"--{other}s: a batch of {subject.name} is counted in {subject.item}s; use --{subject.item}s")
    if given[subject.item] is not None:
        return given[subject.item]
    return max(1, DEFAULT_BATCH[subject.item] // subject.sequence) * subject.sequence


def _check_costs(options: argparse.Namespace) -> None:
    for row in COST_FLAGS:
        value = getattr(options, row.setting)
        or_zero = row.setting == "restart_minutes"
        if value is not None and not (0 < value < float("inf") or or_zero and value == 0):
            raise ValueError(f"{row.name} is {value}; it must be a number above zero")
    if options.goodput is not None and options.goodput > 1:
        raise ValueError(
            f"--goodput is {options.goodput}; it's a share of the time, so it must be above 0 and at most 1"
        )
    if options.goodput is not None and options.total is None:
        raise ValueError("--goodput matters only for the GPU-hours of a full run; give --total as well")
    if options.days is not None and not (options.sweep and options.total):
        raise ValueError("--days needs a sweep to find the fewest GPUs; give --sweep and --total as well")


# ---------------------------------------------------------------- output


def plan_command(options: argparse.Namespace) -> None:
    """Print the plan and its verdict, or the --sweep table, and write the plan to the file given by --json."""
    _check_costs(options)
    if options.sweep:
        print("\n".join(_sweep_lines(options)))
        return
    subject, plan = read_plan(options)
    hours = device_hours(plan, options.total, options.goodput or 1.0) if options.total else None
    saving = _saving(options, plan)
    changes = [] if plan.fits else changes_until_it_fits(plan, subject)
    said, best = sentence(plan, changes), fastest(plan, subject)
    waits = reducing_once(plan, subject)
    lines = [*plan_lines(plan), *_held_back_lines(plan, waits), *_cost_lines(options, plan, saving, hours), "", said]
    print("\n".join([*lines, *_fastest_lines(plan, best), *_paste_lines(options, plan, changes, best)]))
    if options.json:
        costs = {
            "saving": asdict(saving) if saving else None,
            "device_hours": hours,
            "fastest": best.to_json() if best else None,
        }
        write_json(plan.to_json() | costs | {"verdict": said}, options.json)


def _saving(options: argparse.Namespace, plan: Plan) -> SavePlan | None:
    """Return the plan for saving checkpoints; None if no storage speed is given."""
    if options.storage_gb_s is None:
        return None
    return save_plan(
        plan,
        storage_bytes_per_s=options.storage_gb_s * GB,
        device_hours_between_failures=options.hours_between_failures,
        restart_s=options.restart_minutes * MINUTE_S,
    )


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as lines of text: the model, bytes by category, and the bytes sent and time taken per step."""
    settings, cluster = plan.settings, plan.cluster
    active = f" ({format_count(plan.active_params)} active)" if plan.active_params else ""
    yield (
        f"{plan.model}, {format_count(plan.num_params)} parameters{active}, in {settings.precision}, on "
        f"{format_count(cluster.world_size, 'rank')}, {format_count(settings.batch, plan.item)} each"
    )
    api = f" ({settings.api}, {settings.sharding})" if settings.config().is_sharded else ""
    recomputed = f"activation checkpointing: {settings.activation_checkpointing}"
    parts = f", {settings.micro_batches} micro-batches" if settings.micro_batches > 1 else ""
    chunks = f", the loss in {settings.loss_chunks} chunks" if settings.loss_chunks > 1 else ""
    optimizer = f", {OPTIMIZERS[settings.optimizer].title}" if settings.optimizer != "adam" else ""
    yield f"{settings.strategy}{api}, {recomputed}{parts}{chunks}{optimizer}"
    yield from _step_lines(plan)
    yield ""
    rows = plan.by_category() | {f"peak: {plan.peak.when}": plan.peak.bytes}
    rows |= {"allowance": round(cluster.allowance_bytes)}
    if plan.host_bytes:
        rows |= {"in host memory, for each rank": plan.host_bytes}
        rows |= {f"in host memory, for each node of {cluster.node_ranks:,}": plan.node_host_bytes}
    width = max(34, *(len(name) + 1 for name in rows))
    for name, size in rows.items():
        yield f"  {name:<{width}}{format_bytes(size):>8}"
    if plan.host_bytes and cluster.node_ranks == 1 < cluster.world_size:
        yield "The ranks on a node share its host memory; give their number with --ranks-per-node."
    yield ""
    yield from _speed_lines(plan)


def _step_lines(plan: Plan) -> Iterator[str]:
    """Yield the step size over all ranks and micro-batches, and a warning if the step is unusually large."""
    settings, ranks = plan.settings, plan.cluster.world_size
    parts = f" x {settings.micro_batches} parts" if settings.micro_batches > 1 else ""
    samples = f" in {format_count(plan.items_per_step // plan.sequence, 'sequence')}" if plan.sequence > 1 else ""
    yield (
        f"A step has {format_count(ranks, 'rank')} x {format_count(settings.batch, plan.item)}{parts} = "
        f"{format_count(plan.items_per_step, plan.item)}{samples}."
    )
    if plan.item == "token" and plan.items_per_step > LARGE_STEP:
        yield (
            f"That's more than {LARGE_STEP / 1e6:.0f} million, and with steps that large, few runs learn as much from "
            "each token. Fewer ranks, micro-batches or sequences make the step smaller. To use as many ranks for fewer "
            f"sequences, split layers and sequences across ranks. {CHAPTER}."
        )


def _speed_lines(plan: Plan) -> Iterator[str]:
    cluster = plan.cluster
    rate = f"{format_bytes(round(cluster.bandwidth_bytes_per_s))}/s"
    if cluster.ranks_per_node > 1:
        within = cluster.within_bytes_per_s or cluster.bandwidth_bytes_per_s
        rate = f"{format_bytes(round(within))}/s within nodes of {cluster.ranks_per_node} and {rate} between them"
    yield (f"A rank sends {format_bytes(plan.sent_bytes)} in a step: {format_seconds(plan.communication_s)} at {rate}.")
    if plan.time is None:
        return
    time = plan.time
    update = f"the optimizer {format_seconds(time.optimizer_s)}" if time.optimizer_s else "the optimizer not counted"
    yield (
        f"A step takes {format_seconds(time.estimate_s)}: arithmetic {format_seconds(time.arithmetic_s)}, waiting "
        f"{format_seconds(time.exposed_s)}, {update}."
    )
    if not time.optimizer_s:
        yield "The optimizer's update is limited by memory bandwidth; name a --device to include it."
    if plan.step_s is None:
        yield (
            f"That's a lower limit: every unit's forward pass takes less than {format_seconds(LAUNCH_BOUND_S)}, so the "
            "GPU waits for kernels to be launched. Larger batches, fewer units or torch.compile help."
        )
        return
    shortest, longest = (format_seconds(bound) for bound in plan.step_s)
    most, least = plan.items_per_s
    yield f"Between {shortest} and {longest}: {_reason(plan)}."
    speed = plan.items_per_s_estimate
    mfu = f", {plan.mfu:.0%} MFU" if plan.mfu else ""
    yield (
        f"{speed:,.0f} {plan.item}s/s over all ranks ({least:,.0f} to {most:,.0f}), "
        f"{speed / cluster.world_size:,.0f} per rank, {speed * DAY_S:.3g} a day{mfu}."
    )


def _reason(plan: Plan) -> str:
    """Return the reason why the step time is a range."""
    if plan.cluster.device is None:
        lower = f"rates {TYPICAL_RANGE:.0%} lower"
        return f"the first with all communication hidden behind arithmetic; the second with none, and {lower}"
    device = named_device(plan.cluster.device)
    if device.measured:
        return f"published runs on {device.title} are up to {TYPICAL_RANGE:.0%} faster or slower"
    return f"there's no published run on {device.title}, so we assume the most similar device's share of the peak rate"


def _held_back_lines(plan: Plan, waits: Plan | None) -> Iterator[str]:
    """Yield the savings and the cost of reducing gradients only after the last micro-batch."""
    if waits is None:
        return
    fits = "which fits" if waits.fits else "which doesn't fit"
    yield (
        f"Gradients are reduced after each micro-batch. If they're reduced only after the last one "
        f"(--no-sync-micro-batches), a rank sends {format_bytes(plan.sent_bytes - waits.sent_bytes)} less and peaks at "
        f"{format_bytes(waits.peak.bytes)}, {fits}."
    )


def _cost_lines(options: argparse.Namespace, plan: Plan, saving: SavePlan | None, hours: float | None) -> Iterator[str]:
    if saving is None:
        yield (
            f"A checkpoint takes {format_bytes(plan.checkpoint_bytes)}; give --storage-gb-s, a node's write rate, to "
            "see how often to save."
        )
    else:
        yield (
            f"A checkpoint takes {format_bytes(saving.checkpoint_bytes)} and {format_seconds(saving.save_s)} to write. "
            f"If there's a failure every {format_seconds(HOUR_S * saving.hours_between_failures)}, and it takes "
            f"{options.restart_minutes:g} minutes until all ranks are training again, save every "
            f"{format_seconds(saving.every_s)} and lose {saving.lost_share:.1%} of the time."
        )
    if hours is not None:
        share = f"of which {options.goodput:.0%} is training" if options.goodput else f"without {LEFT_OUT} (--goodput)"
        days = hours / plan.cluster.world_size / DAY_HOURS
        yield f"{options.total:.3g} {plan.item}s take {hours:,.0f} GPU-hours, {days:,.1f} days, {share}."


def _fastest_lines(plan: Plan, best: Plan | None) -> Iterator[str]:
    """Yield the fastest plan on the same cluster, or a sentence saying that nothing is faster."""
    if best is None or plan.step_s is None:
        return
    if best.settings == plan.settings:
        yield "Nothing we tried is faster."
        return
    settings = best.settings
    yield (
        f"Fastest of the plans we tried: {settings.batch:,} {plan.item}s on each rank, sharding {settings.sharding}, "
        f"activation checkpointing {settings.activation_checkpointing}: {best.items_per_s_estimate:,.0f} "
        f"{plan.item}s/s, peak {format_bytes(best.peak.bytes)}."
    )


def _paste_lines(
    options: argparse.Namespace, plan: Plan, changes: list[tuple[str, Plan]], best: Plan | None
) -> Iterator[str]:
    """Yield a command for the recommended plan: the plan after all changes or, if `plan` fits, the fastest plan."""
    advised = changes[-1][1] if changes else best if plan.fits else None
    if advised is None or plan.fits and (advised.settings == plan.settings or plan.step_s is None):
        return
    if not advised.fits:
        return
    yield "To plan that:"
    yield f"  {shlex.join(command_of(options, advised))}"


def command_of(options: argparse.Namespace, plan: Plan) -> list[str]:
    """Return the words of a command that makes `plan`, with the model taken from `options`."""
    words = ["python", "-m", "fsdp_helpers", "plan"]
    for name in ("model", "config"):
        words += [f"--{name}", str(getattr(options, name))] if getattr(options, name) else []
    for name in ("context", "lora_rank"):
        words += Flag(setting=name, kind=int, meaning="").words(getattr(options, name))
    words += ["--world-size", str(plan.cluster.world_size)]
    given = given_settings(vars(options), CLUSTER_FLAGS)
    for row in CLUSTER_FLAGS:
        words += row.words(given.get(row.setting))
    for row in TRAINING_FLAGS:
        words += row.words(getattr(plan.settings, row.setting))
    if plan.settings.batch != _batch(argparse.Namespace(images=None, tokens=None), plan):
        words += [f"--{plan.item}s", str(plan.settings.batch)]
    return words


# ---------------------------------------------------------------- the table


def _sweep_lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the --sweep table and, with --days, the smallest number of GPUs that finish in time."""
    first = read_subject(options)
    contexts = [options.context] if options.context or first.item != "token" else CONTEXTS
    subjects = [read_subject(argparse.Namespace(**vars(options) | {"context": context})) for context in contexts]
    settings = read_settings(options, first)
    cluster_of = partial(read_cluster, options, settings.precision)
    goodput = options.goodput or 1.0
    hours = " GPU-hours      days" if options.total else ""
    yield f"{first.name}, {settings.precision}, {settings.optimizer}, up to {options.world_size:,} ranks"
    yield f"{'GPUs':>6} {'sequence':>8} {'batch':>9} {'recompute':>9} {'chunks':>6} {'sharding':>8} {'peak':>8} {first.item + 's/s':>12}{hours}"
    for row in sweep(subjects, settings, cluster_of, powers_of_two(options.world_size)):
        yield _row_line(row, options.total, goodput)
    if options.days:
        yield from _fewest_lines(options, subjects, settings, cluster_of, goodput)


def _row_line(row: Row, total: float | None, goodput: float) -> str:
    start = f"{row.world_size:>6,} {row.sequence:>8,}"
    if row.best is None:
        return f"{start} nothing we tried fits"
    plan, chosen = row.best, row.best.settings
    line = (
        f"{start} {chosen.batch:>9,} {chosen.activation_checkpointing:>9} {chosen.loss_chunks:>6} "
        f"{chosen.sharding:>8} {format_bytes(plan.peak.bytes):>8} {plan.items_per_s_estimate:>12,.0f}"
    )
    if not total:
        return line
    return f"{line} {device_hours(plan, total, goodput):>9,.0f} {days_of(plan, total, goodput):>9,.1f}"


def _fewest_lines(
    options: argparse.Namespace, subjects: list[Subject], settings: Settings, cluster_of: partial, goodput: float
) -> Iterator[str]:
    """Yield the smallest number of GPUs that finish in time, for each sequence length."""
    within = f"{options.days:g} day{'s' * (options.days != 1)}"
    for subject in subjects:
        limits = {"total": options.total, "days": options.days, "most": options.world_size, "goodput": goodput}
        plan = fewest_ranks(subject, settings, cluster_of, **limits)
        with_sequences = f" in sequences of {subject.sequence:,}" if subject.sequence > 1 else ""
        what = f"{options.total:.3g} {subject.item}s{with_sequences}"
        if plan is None:
            yield f"{what}: {options.world_size:,} GPUs don't finish within {within}."
            continue
        days = days_of(plan, options.total, goodput)
        yield (
            f"{what}: {plan.cluster.world_size:,} GPUs are the fewest that finish within {within}: "
            f"{days:,.1f} days, {plan.items_per_step:,} {plan.item}s per step."
        )
