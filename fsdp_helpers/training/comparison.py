"""The final comparison: every strategy, with both APIs, on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from fsdp_helpers.config import APIS, STRATEGIES, TrainConfig, is_sharded
from fsdp_helpers.quantities import format_bytes, format_seconds
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.records import ComparisonRow, RunRecord
from fsdp_helpers.training.watch import STEADY_STEP
from fsdp_helpers.training.worker import train_worker

HEADERS = ("model", "strategy", "ranks", "step time", "held", "peak", "sent a step", "final loss")
SHORT_HEADERS = ("model", "strategy", "ranks", "step", "held", "peak", "sent", "loss")


def comparison_configs(models: Sequence[str], base: TrainConfig, device: str) -> list[TrainConfig]:
    """Return a configuration per model, strategy and variant that can run on `device`, by `why_left_out`."""
    chosen = [
        replace(base, model=model, strategy=strategy, **way)
        for model in models
        for strategy in STRATEGIES
        for way in ways_to_run(strategy)
    ]
    return [config for config in chosen if why_left_out(config, device) is None]


def ways_to_run(strategy: str) -> list[dict]:
    """Return the settings for each of a strategy's rows: FSDP with each API; DDP with and without `bucket_view`."""
    if is_sharded(strategy):
        return [{"api": api} for api in APIS]
    return [{"bucket_view": False}, {"bucket_view": True}] if strategy == "ddp" else [{}]


def why_left_out(config: TrainConfig, device: str) -> str | None:
    """Return why this configuration can't run on `device`; None if it can."""
    try:
        config.check_device(device)
    except ValueError as reason:
        return str(reason)
    return None


def compare(
    configs: Sequence[TrainConfig], *, world_size: int, device: str, progress: bool = False
) -> list[ComparisonRow]:
    """Run the configurations one by one."""
    rows = []
    for config in configs:
        ranks = 1 if config.strategy == "local" else world_size
        records = launch(train_worker, config, world_size=ranks, device=device, progress=progress)
        rows.append(comparison_row(records[0]))
    return rows


def comparison_row(record: RunRecord) -> ComparisonRow:
    """Return the row for a run, which must have taken more than STEADY_STEP steps."""
    config, rank = record.config, record.ranks[0]
    return ComparisonRow(
        model=config.model,
        strategy=config.strategy,
        api=config.api if config.is_sharded else None,
        world_size=record.world_size,
        step_s=median(record.step_seconds[STEADY_STEP:]),
        held_bytes=rank.held_bytes,
        peak_bytes=rank.peak_bytes,
        moved_bytes=sum(seen.bytes for seen in rank.collectives),
        sent_bytes=rank.sent_bytes,
        final_loss=record.step_losses[-1],
        bucket_view=config.bucket_view,
    )


def comparison_cells(row: ComparisonRow) -> list[str]:
    """Return a row's cells as text, in the order of HEADERS."""
    return [
        row.model,
        row.label,
        str(row.world_size),
        format_seconds(row.step_s),
        format_bytes(row.held_bytes),
        format_bytes(row.peak_bytes),
        "?" if row.sent_bytes is None else format_bytes(row.sent_bytes),
        f"{row.final_loss:.4f}",
    ]


def plain_table(rows: Sequence[ComparisonRow]) -> str:
    """Return the comparison as a table for an 80-column terminal, with names left-aligned and numbers right-aligned.

    Times are medians, "sent" is the number of bytes one rank sends in a step, and the loss is from the last step.
    """
    lines = [list(SHORT_HEADERS), *(comparison_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(SHORT_HEADERS))]
    return "\n".join(" ".join(_padded(line, widths)) for line in lines)


def _padded(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.ljust(width) if column < 2 else cell.rjust(width + (column > 3))  # wider gaps between numbers
