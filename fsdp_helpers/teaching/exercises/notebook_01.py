"""Exercises for notebook 01: count parameters, fill a memory budget, and find the largest batch."""

from collections.abc import Callable

from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import DRAW, FRESH_CASES, call, exercise, expect, expect_whole_number
from fsdp_helpers.teaching.exercises.runs import AS_IT_IS, RunTask, judge_run

LARGEST_BATCH = RunTask(
    peak_bytes=60_000_000, world_size=1, strategies=("local",), fixed={"model": "shallow", **AS_IT_IS}
)


@exercise("01")
def check_parameter_count(answer: int | None) -> str:
    """Notebook 01: check the parameter count of a convolution from 64 to 128 channels with 5 x 5 kernels and a bias."""
    expect_whole_number(answer)
    # 128 kernels, each with 64 x 5 x 5 weights and one bias
    right = 128 * (64 * 5 * 5) + 128
    expect(
        answer == right,
        f"{format_count(answer)} isn't right: how many weights does a kernel have, how many kernels are there, and "
        f"which other parameters does the layer have?",
    )
    return f"Right: {format_count(right)} parameters."


@exercise("01")
def check_largest_model(largest_model: Callable[[int], int] | None) -> str:
    """Notebook 01: check how many fp32 parameters fit in a memory budget with their gradients and Adam moments."""
    for budget_bytes in (0, 15, 16, 31, *(DRAW.randint(32, 80 * 10**9) for _ in range(FRESH_CASES))):
        answer = call(largest_model, budget_bytes)
        expect_whole_number(answer)
        says = f"for {format_count(budget_bytes)} bytes, your function returns {format_count(answer)}; "
        expect(16 * answer <= budget_bytes, f"{says}that many don't fit with their gradients and Adam's moments")
        expect(16 * (answer + 1) > budget_bytes, f"{says}there's room for more")
    return "Right: 16 bytes per parameter, rounded down to a whole number of parameters."


@exercise("01")
def check_largest_batch(record: RunRecord | None) -> str:
    """Notebook 01: check the largest power-of-two batch that keeps ShallowNet's peak below 60 MB in one process."""
    verdict = judge_run(record, LARGEST_BATCH)
    batch_size = record.config.global_batch_size
    expect(batch_size & (batch_size - 1) == 0, f"{batch_size} stays below the limit, but isn't a power of two")
    # The held bytes don't grow with the batch; everything on top of them doubles when the batch does.
    rank = record.ranks[0]
    with_twice_the_batch = 2 * rank.peak_bytes - rank.held_bytes
    expect(
        with_twice_the_batch >= LARGEST_BATCH.peak_bytes,
        f"a batch of {batch_size} peaks at {format_bytes(rank.peak_bytes)}, and the next power of two would still fit",
    )
    return f"{verdict} Twice the batch would need about {format_bytes(with_twice_the_batch)}."
