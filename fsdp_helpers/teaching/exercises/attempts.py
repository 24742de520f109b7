"""Checkers of runs: a record that a reader's attempt brought back, against what the exercise asks for and forbids."""

from dataclasses import dataclass, field

from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import exercise, expect, expect_answered, in_short


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """A run to be found: what its text leaves as it is, and what it must reach. All other settings are free."""

    peak_bytes: int  # every rank stays below
    num_collectives: int | None = None  # allowed in a step
    world_size: int | None = None
    strategies: tuple[str, ...] = ("fsdp", "fsdp-auto-wrap")
    fixed: dict[str, object] = field(default_factory=dict)


AS_IT_IS = {"dropout": True, "micro_batches": 1, "activation_checkpointing": "none", "precision": "fp32"}
LARGEST_BATCH = RunTask(
    peak_bytes=60_000_000, world_size=1, strategies=("local",), fixed={"model": "shallow", **AS_IT_IS}
)
LOWER_PEAK = RunTask(peak_bytes=30_000_000, fixed={"model": "shallow", "global_batch_size": 96, **AS_IT_IS})
THRESHOLD = RunTask(
    peak_bytes=1_450_000_000,
    num_collectives=9,
    world_size=2,
    strategies=("fsdp-auto-wrap",),
    fixed={
        "model": "deep",
        "global_batch_size": 32,
        "api": "fsdp2",
        "sharding": "full",
        "reshard_after_forward": True,
        **AS_IT_IS,
    },
)
LEVERS = RunTask(
    peak_bytes=80_000_000,
    world_size=2,
    fixed={"model": "vit-deep", "global_batch_size": 64, "dropout": True, "activation_checkpointing": "none"},
)


@exercise("01")
def check_largest_batch(record: RunRecord | None) -> str:
    """Notebook 01: the largest power of two as batch with which ShallowNet peaks below 60 MB in one process."""
    verdict = _check_run(record, LARGEST_BATCH)
    batch_size = record.config.global_batch_size
    expect(batch_size & (batch_size - 1) == 0, f"{batch_size} is below the limit, but no power of two")
    # What is held does not grow with the batch; what comes on top of it doubles with it.
    rank = record.ranks[0]
    with_twice_the_batch = 2 * rank.peak_bytes - rank.held_bytes
    expect(
        with_twice_the_batch >= LARGEST_BATCH.peak_bytes,
        f"a batch of {batch_size} peaks at {format_bytes(rank.peak_bytes)}, and the next power of two would still fit",
    )
    return f"{verdict} Twice the batch would need about {format_bytes(with_twice_the_batch)}."


@exercise("03")
def check_lower_peak(record: RunRecord | None) -> str:
    """Notebook 03: ShallowNet below 30 MB on every rank, with the same batch."""
    return _check_run(record, LOWER_PEAK)


@exercise("04")
def check_threshold(record: RunRecord | None) -> str:
    """Notebook 04: DeepNet on two ranks, cut to stay below a peak, with a limit on the collectives of a step."""
    return _check_run(record, THRESHOLD)


@exercise("07")
def check_levers(record: RunRecord | None) -> str:
    """Notebook 07: the transformer on two ranks below 80 MB, without activation checkpointing."""
    return _check_run(record, LEVERS)


def _check_run(record: RunRecord | None, task: RunTask) -> str:
    expect_answered(record)
    expect(isinstance(record, RunRecord), f"the answer is {in_short(record)}; what `train` returns is asked for")
    _expect_same_settings(record, task)
    expect(record.ranks[0].peak_bytes is not None, "a run of one step has no steady step to measure; run 3 steps")
    peak_bytes = max(rank.peak_bytes for rank in record.ranks)
    expect(
        peak_bytes < task.peak_bytes,
        f"the run peaks at {format_bytes(peak_bytes)} on a rank, the target is below {format_bytes(task.peak_bytes)}",
    )
    verdict = f"Right: {format_bytes(peak_bytes)} at the peak, below {format_bytes(task.peak_bytes)}."
    if task.num_collectives is None:
        return verdict
    counted = max(sum(seen.count for seen in rank.collectives) for rank in record.ranks)
    expect(
        counted <= task.num_collectives, f"{counted} collectives a step, the target is at most {task.num_collectives}"
    )
    return f"{verdict} {counted} collectives a step."


def _expect_same_settings(record: RunRecord, task: RunTask) -> None:
    """Raise NotYet where the run differs in what the exercise leaves as it is."""
    settings = record.config.__dict__
    for name, value in task.fixed.items():
        expect(settings[name] == value, f"the exercise leaves {name} at {value!r}; your run has {settings[name]!r}")
    expect(
        record.config.strategy in task.strategies,
        f"the exercise is about strategy {' or '.join(task.strategies)}; your run has {record.config.strategy!r}",
    )
    expect(
        task.world_size in (None, record.world_size),
        f"the exercise is about {task.world_size} rank(s); your run has {record.world_size}",
    )
