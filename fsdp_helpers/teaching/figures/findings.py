"""The titles of figures: one sentence each that says what the figure shows, made from the numbers that it draws."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from fsdp_helpers.measuring.copies import TO_DEVICE, TO_HOST
from fsdp_helpers.quantities import GB, MB, format_bytes, format_count
from fsdp_helpers.records import ComparisonRow, MemoryCurve, RankRecord, Rung, StepTrace

SAME = 1e-4  # nats; what other orders of the same fp32 sums leave is far less


def titled(finding: str, subject: str) -> str:
    """Put the finding first, and below it what was looked at; either may be missing."""
    return "\n".join(line for line in (finding, subject) if line)


def same_losses(runs: Sequence[Sequence[float]]) -> str:
    """Say how far apart the losses of several runs are, if they are the same; else nothing."""
    if len(runs) < 2 or len({len(losses) for losses in runs}) > 1:
        return ""
    gaps = [max(losses) - min(losses) for losses in zip(*runs, strict=True) if not any(map(math.isnan, losses))]
    if len(gaps) < len(runs[0]) or not gaps:  # a NaN equals nothing, and max() may skip it
        return ""
    gap = max(gaps)
    return f"Same losses: at most {_short(gap)} apart" if gap < SAME else ""


def _short(value: float) -> str:
    """One digit and a power of ten: 6e-8, not 6e-08."""
    digit, _, power = f"{value:.0e}".partition("e")
    return f"{digit}e{int(power)}" if value else "0"


def peak_of_curve(curve: MemoryCurve) -> str:
    """Say in which phase a step peaks, and how far above what is held between steps."""
    peak_s = curve.times_s[curve.allocated_bytes.index(curve.peak_bytes)]
    starts_s = [phase.start_s for phase in curve.phases]
    place = bisect_right(starts_s, peak_s) - 1
    where = f"comes in {curve.phases[max(0, place)].name}" if curve.phases else ""
    above = f"{curve.peak_bytes / curve.held_bytes:.1f} times what is held between steps" if curve.held_bytes else ""
    if where and above:
        return f"The peak {where}, {above}"
    return f"The peak {where or f'is {above}'}" if where or above else ""


def sent_in_a_step(traces: Sequence[StepTrace]) -> str:
    """Say how many collectives a step has, and what a rank sends for them."""
    counts = [len(trace.collectives) for trace in traces]
    sent = [sum(seen.sent_bytes for seen in trace.collectives) for trace in traces]
    who = "each rank" if len(set(zip(counts, sent, strict=True))) == 1 and len(traces) > 1 else "rank 0"
    return f"In {counts[0]} collective{'s' * (counts[0] != 1)} {who} sends {format_bytes(sent[0])}"


def lowest_peak(ranks: Mapping[str, RankRecord]) -> str:
    """Say which runs have the lowest peak, and what they hold and peak at, as shares of the first run."""
    (first, base), *others = ranks.items()
    if not others:
        return ""
    least = min((record for _, record in others), key=lambda record: record.peak_bytes)
    names = [name for name, record in others if _mb(record.peak_bytes) == _mb(least.peak_bytes)]
    held, peak = least.held_bytes / base.held_bytes, least.peak_bytes / base.peak_bytes
    return f"{' and '.join(names)}: {_percent(held)} of what {first} holds, {_percent(peak)} of its peak"


def foot_of_the_ladder(rungs: Sequence[Rung]) -> str:
    """Say how far the lowest rung's peak lies below the first."""
    least = min(rungs, key=lambda rung: rung.peak_bytes)
    if least is rungs[0]:
        return ""
    share = least.peak_bytes / rungs[0].peak_bytes
    return f"The lowest peak is {_mb(least.peak_bytes)} MB, {_percent(share)} of the first rung's {_mb(rungs[0].peak_bytes)}"


def least_of_the_comparison(rows: Sequence[ComparisonRow]) -> str:
    """Say which strategies of one model have the lowest peak, and how far below the first."""
    least = min(row.peak_bytes for row in rows)
    names = [row.label for row in rows if row.peak_bytes == least]
    share = f", {_percent(least / rows[0].peak_bytes)} of {rows[0].label}'s" if rows[0].label not in names else ""
    return f"{rows[0].model}: the lowest peak is that of {' and '.join(names)}{share}"


def copies_of_a_step(ways: Sequence[str]) -> str:
    """Say how often units travel each way."""
    return f"Copies of units: {ways.count(TO_DEVICE)} to the device, {ways.count(TO_HOST)} to the host"


def fits_from(needed_bytes: Mapping[int, float], device_bytes: float) -> str:
    """Say from how many ranks on, of those drawn, a rank's bytes fit its device."""
    too_few = [ranks for ranks, needed in needed_bytes.items() if needed > device_bytes]
    enough = [ranks for ranks in needed_bytes if ranks > max(too_few, default=0)]
    if not enough:
        return f"Does not fit {device_bytes / GB:.0f} GB on any of these numbers of ranks"
    return f"Fits {device_bytes / GB:.0f} GB from {format_count(min(enough))} ranks on"


def errors_within(errors: Sequence[float], bound: float) -> str:
    """Say how many predictions lie within `bound` of the measurement, and how far off the worst one is."""
    within = sum(round(abs(error), 6) <= bound for error in errors)
    worst = max(abs(error) for error in errors)
    return f"{within} of {len(errors)} peaks within {_percent(bound)}; the worst is {_percent(worst, 1)} off"


def slowed_by(steps_s: Mapping[float, float], unlimited_s: float) -> str:
    """Say how many times as long a step takes over the slowest of the links, by bandwidth in Mbit/s."""
    slowest = min(steps_s)
    return (
        f"At {slowest:,.0f} Mbit/s a step takes {steps_s[slowest] / unlimited_s:.0f} times as long as without a limit"
    )


def _percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def _mb(size: float) -> str:
    return f"{size / MB:,.1f}"
