"""Judge whether the run for an exercise meets the targets without changing any fixed settings."""

from dataclasses import dataclass, field
from typing import Any

from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import expect, expect_answered, in_short


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """The run that an exercise asks for: its targets and fixed settings. The reader chooses all other settings."""

    peak_bytes: int  # every rank has to stay below it
    peak_failure: str | None = None  # the failure whose file to show if a rank with only one unit doesn't
    num_collectives: int | None = None  # the most allowed per step
    world_size: int | None = None
    strategies: tuple[str, ...] = ("fsdp", "fsdp-auto-wrap")
    fixed: dict[str, Any] = field(default_factory=dict)


AS_IT_IS = {"dropout": True, "micro_batches": 1, "activation_checkpointing": "none", "precision": "fp32"}


def judge_run(record: RunRecord | None, task: RunTask) -> str:
    """Return the verdict on a run; raise NotYet with the numbers if the run misses a requirement."""
    expect_answered(record)
    expect(
        isinstance(record, RunRecord), f"the answer is {in_short(record)}; it should be the record that `train` returns"
    )
    _expect_same_settings(record, task)
    expect(record.ranks[0].peak_bytes is not None, "a one-step run has no steady step to measure; run 3 steps")
    peak_bytes, num_units = max((rank.peak_bytes, rank.num_units) for rank in record.ranks)
    expect(
        peak_bytes < task.peak_bytes,
        f"a rank peaks at {format_bytes(peak_bytes)}; every rank has to stay below {format_bytes(task.peak_bytes)}",
        *([task.peak_failure] if task.peak_failure and num_units == 1 else []),
    )
    verdict = f"Right: {format_bytes(peak_bytes)} at the peak, below {format_bytes(task.peak_bytes)}."
    if task.num_collectives is None:
        return verdict
    counted = max(sum(seen.count for seen in rank.collectives) for rank in record.ranks)
    expect(
        counted <= task.num_collectives,
        f"a step runs {counted} collectives; the target is at most {task.num_collectives}",
        "slow-many-units",
    )
    return f"{verdict} A step runs {counted} collectives."


def _expect_same_settings(record: RunRecord, task: RunTask) -> None:
    """Raise NotYet if the run changes a setting that the exercise fixes."""
    settings = record.config.__dict__
    for name, value in task.fixed.items():
        expect(settings[name] == value, f"the exercise keeps {name} at {value!r}; your run has {settings[name]!r}")
    expect(
        record.config.strategy in task.strategies,
        f"the exercise asks for the {' or '.join(task.strategies)} strategy; your run uses {record.config.strategy!r}",
    )
    expect(
        task.world_size in (None, record.world_size),
        f"the exercise asks for a world size of {task.world_size}; your run has {record.world_size}",
    )
