"""Measured figures in words, for readers who can't see them: their numbers, in reading order."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from fsdp_helpers.measuring.errors import ErrorRow
from fsdp_helpers.planning.plan import Plan
from fsdp_helpers.planning.walk.ledger import Peak
from fsdp_helpers.quantities import GB, MB, in_mb
from fsdp_helpers.ranks.progress import count_ranks
from fsdp_helpers.records import ComparisonRow, MemoryCurve, RankRecord, Rung, StepTrace
from fsdp_helpers.teaching.figures.bars import held_parts, peak_parts
from fsdp_helpers.teaching.figures.findings import (
    least_of_the_comparison,
    lowest_by_ranks,
    peak_of_curve,
    same_losses,
    sent_in_a_step,
)


def sentences(*parts: str) -> str:
    """Join sentences that are not empty, each with a full stop at its end."""
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)


def digits_in_words(labels: Sequence[int], shown: Sequence[int]) -> str:
    """Name the digits from left to right and, for each wrong prediction, what would be right."""
    named = [
        str(one) if one == right else f"{one} (wrong: it is {right})" for one, right in zip(shown, labels, strict=True)
    ]
    return f"Handwritten digits, from left to right: {', '.join(named)}."


def curve_in_words(curve: MemoryCurve, subject: str, notes: Mapping[str, float] | None = None) -> str:
    """Say what is allocated at both ends of a step, the most in each phase, and what the notes mark."""
    ends = [in_mb(curve.allocated_bytes[place]) for place in (0, -1)]
    most = [f"{in_mb(size)} MB in {name}" for name, size in _most_by_phase(curve)]
    marked = [
        f"at {1e3 * time_s:.0f} ms, {text}" for text, time_s in sorted((notes or {}).items(), key=lambda note: note[1])
    ]
    return sentences(
        subject,
        peak_of_curve(curve),
        f"Allocated bytes over {1e3 * curve.end_s:,.0f} ms: {ends[0]} MB at the beginning, "
        f"{ends[1]} MB at the end, {in_mb(curve.peak_bytes)} MB at the peak",
        f"The most in each phase: {', '.join(most)}" if most else "",
        f"Marked: {'; '.join(marked)}" if marked else "",
    )


def _most_by_phase(curve: MemoryCurve) -> Iterator[tuple[str, int]]:
    for phase in curve.phases:
        inside = [
            size
            for size, start_s, end_s in zip(
                curve.allocated_bytes, curve.times_s, (*curve.times_s[1:], phase.end_s), strict=True
            )
            if start_s < phase.end_s and end_s > phase.start_s
        ]
        if inside:
            yield phase.name, max(inside)


def traffic_in_words(traces: Sequence[StepTrace], subject: str) -> str:
    """Say how many collectives of each kind every rank starts, phase by phase."""
    ranks = [f"Rank {rank}: {'; '.join(_by_phase(trace))}" for rank, trace in enumerate(traces)]
    return sentences(subject, sent_in_a_step(traces), *ranks)


def _by_phase(trace: StepTrace) -> Iterator[str]:
    def phase_of(start_s: float) -> str:
        before = [phase.name for phase in trace.curve.phases if phase.start_s <= start_s]
        return f"in {before[-1]}" if before else "in the step"

    for where, seen in groupby(trace.collectives, key=lambda one: phase_of(one.start_s)):
        ops = [one.op for one in seen]
        yield f"{where} {' and '.join(f'{ops.count(op)} {op}' for op in dict.fromkeys(ops))}"


def held_and_peak_in_words(rows: Mapping[str, tuple[str, RankRecord]], peaks: Mapping[str, Peak]) -> str:
    """Say for each row what a rank holds and has at the peak, with its parts."""
    told = [
        f"{label.replace(chr(10), ' ')}: held {in_mb(record.held_bytes)} MB ({_parts(held_parts(record))}); "
        f"peak {in_mb(record.peak_bytes)} MB ({_parts(peak_parts(peaks[name]))})"
        for label, (name, record) in rows.items()
    ]
    return sentences(*told)


def _parts(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {in_mb(size)}" for kind, size in sizes.items() if size >= MB / 20)


def by_ranks_in_words(peaks: Mapping[str, Mapping[int, int]], num_params: int) -> str:
    """Say for each line its bytes per parameter on each number of ranks."""
    told = [
        f"{name}: {', '.join(f'{size / num_params:.1f} on {count_ranks(ranks)}' for ranks, size in by_ranks.items())}"
        for name, by_ranks in peaks.items()
    ]
    return sentences(lowest_by_ranks(peaks, num_params), "Peak on a rank in bytes per parameter", *told)


def ladder_in_words(rungs: Sequence[Rung]) -> str:
    """Say for each rung the bytes that are held, at the peak and predicted, and the step's time."""
    return sentences(
        *(f"{rung.name}: {_held_peak_time(rung)}, peak predicted at {in_mb(rung.predicted_bytes)} MB" for rung in rungs)
    )


def comparison_in_words(rows: Sequence[ComparisonRow]) -> str:
    """Say for each model and strategy the bytes that are held and at the peak, and the step's time."""
    told = []
    for _, of_one in groupby(rows, key=lambda row: row.model):
        chosen = list(of_one)
        told += [least_of_the_comparison(chosen), *(f"{row.label}: {_held_peak_time(row)}" for row in chosen)]
    return sentences(*told)


def _held_peak_time(row: Rung | ComparisonRow) -> str:
    return f"held {in_mb(row.held_bytes)} MB, peak {in_mb(row.peak_bytes)} MB, {1e3 * row.step_s:,.0f} ms per step"


def losses_in_words(runs: Mapping[str, Sequence[float]]) -> str:
    """Say where each run's loss begins and ends, and between which values it stays."""
    told = [
        f"{name}: {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}, lowest {min(losses):.3f}, "
        f"highest {max(losses):.3f}"
        for name, losses in runs.items()
        if losses
    ]
    return sentences("Loss over the global batch in nats", same_losses(list(runs.values())), *told)


def bandwidths_in_words(rates: Sequence[dict]) -> str:
    """Say for each bandwidth how long a step was measured to take, and how long its bytes take alone."""
    told = []
    for row in rates:
        limit, measured = row["bits_per_s"], f"a step takes {1e3 * row['step_s']:,.0f} ms"
        if limit is None:
            told.append(f"Without a limit {measured}")
        else:
            alone_ms = 8e3 * row["sent_bytes"] / limit
            told.append(f"At {limit / 1e6:,.0f} Mbit/s {measured}; its bytes alone need {alone_ms:,.0f} ms")
    return sentences(*told)


def copies_in_words(copies: Sequence[tuple[str, str, float]]) -> str:
    """Say which unit travels when, in each direction; `copies` are unit, direction and time."""
    ways = dict.fromkeys(way for _, way, _ in copies)
    units = {way: [unit.removeprefix("blocks.") for unit, one, _ in copies if one == way] for way in ways}
    return sentences(*(f"Copied {way}, in this order: {', '.join(names)}" for way, names in units.items()))


def waterfall_in_words(plans: Sequence[Plan]) -> str:
    """Say for each number of ranks what a rank needs, and the largest part of it."""
    told = []
    for plan in plans:
        name, size = max(plan.by_category().items(), key=lambda part: part[1])
        ranks = count_ranks(plan.cluster.world_size)
        told.append(f"{ranks}: {plan.needed_bytes / GB:,.0f} GB, the largest part {name} with {size / GB:,.0f} GB")
    return sentences(*told)


def errors_in_words(rows: Sequence[ErrorRow]) -> str:
    """Say for each variant between which errors its predictions lie."""
    told = []
    for variant in dict.fromkeys(row.variant for row in rows):
        errors = [round(100 * row.error, 2) + 0.0 for row in rows if row.variant == variant]  # no -0.00
        told.append(
            f"{variant}: {len(errors)} prediction{'s' * (len(errors) != 1)}, {min(errors):+.2f} % to {max(errors):+.2f} %"
        )
    return sentences(*told)


def orders_in_words(orders: Mapping[str, Sequence[str]]) -> str:
    """Say for each setting what comes after what."""
    return sentences("Events of a forward in time", *(f"{name}: {', '.join(order)}" for name, order in orders.items()))
