"""Figure titles, generated from a figure's numbers; each one states the finding in one sentence."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import isinf

from fsdp_helpers.measuring.offload_copies import TO_DEVICE, TO_HOST
from fsdp_helpers.quantities import GB, format_bytes, format_count, in_mb
from fsdp_helpers.records import LeverResult, MemoryCurve, RankRecord, StepTrace


def titled(finding: str, subject: str) -> str:
    """Return a title with the finding first and its subject below; either may be empty."""
    return "\n".join(line for line in (finding, subject) if line)


def peak_of_curve(curve: MemoryCurve) -> str:
    """State a step's peak phase, and how far the peak is above the held bytes; return "" for a curve without phases."""
    if not curve.phases:
        return ""
    peak_s = curve.times_s[curve.allocated_bytes.index(curve.peak_bytes)]
    starts_s = [phase.start_s for phase in curve.phases]
    place = bisect_right(starts_s, peak_s) - 1
    above = f", {_above_held(curve)}" if curve.held_bytes else ""
    return f"The peak comes in {curve.phases[max(0, place)].name}{above}"


def _above_held(curve: MemoryCurve) -> str:
    times = curve.peak_bytes / curve.held_bytes
    how_far = f"{times:.1f} times" if times >= 1.15 else f"{_percent(times - 1)} above"
    return f"{how_far} what is held between steps"


def lowest_by_ranks(peaks: Mapping[str, Mapping[int, int]], num_params: int) -> str:
    """State which line is lowest at the largest number of ranks, in bytes per parameter and relative to the highest."""
    most = max(ranks for by_ranks in peaks.values() for ranks in by_ranks)
    there = {name: by_ranks[most] for name, by_ranks in peaks.items() if most in by_ranks}
    least, greatest = min(there, key=there.__getitem__), max(there, key=there.__getitem__)
    if there[least] == there[greatest]:
        return ""
    return (
        f"On {format_count(most, 'rank')}, {least.replace(', ', ' with ')} peaks at {there[least] / num_params:.1f} bytes "
        f"per parameter, {_percent(there[least] / there[greatest])} of {greatest}'s"
    )


def sent_in_a_step(traces: Mapping[int, StepTrace]) -> str:
    """State how many collectives there are, and how many bytes a rank sends for them; or how far each rank came."""
    counts = {rank: len(trace.collectives) for rank, trace in traces.items()}
    hung = [rank for rank, trace in traces.items() if any(isinf(seen.end_s) for seen in trace.collectives)]
    if hung or len(set(counts.values())) > 1:
        begun = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
        stuck = "".join(f"; number {counts[rank]} on rank {rank} never ended" for rank in hung)
        return f"Collectives begun: {begun}{stuck}"
    sent = [sum(seen.sent_bytes for seen in trace.collectives) for trace in traces.values()]
    first, count = next(iter(counts.items()))
    who = "each rank" if len(set(sent)) == 1 and len(traces) > 1 else f"rank {first}"
    return f"In {format_count(count, 'collective')}, {who} sends {format_bytes(sent[0])}"


def lowest_peak(ranks: Mapping[str, RankRecord]) -> str:
    """State which runs have the lowest peak, and compare their held and peak bytes with the first run's."""
    (first, base), *others = ranks.items()
    if not others:
        return ""
    least = min((record for _, record in others), key=lambda record: record.peak_bytes)
    names = [name for name, record in others if in_mb(record.peak_bytes) == in_mb(least.peak_bytes)]
    held, peak = least.held_bytes / base.held_bytes, least.peak_bytes / base.peak_bytes
    return f"{' and '.join(names)}: {_percent(held)} of what {first} holds, {_percent(peak)} of its peak"


def foot_of_the_ladder(rungs: Sequence[LeverResult]) -> str:
    """State the lowest peak, in bytes and as a fraction of the first rung's peak."""
    least = min(rungs, key=lambda rung: rung.peak_bytes)
    if least is rungs[0]:
        return ""
    share = least.peak_bytes / rungs[0].peak_bytes
    return f"The lowest peak is {in_mb(least.peak_bytes)} MB, {_percent(share)} of {rungs[0].name}'s {in_mb(rungs[0].peak_bytes)}"


def copies_of_a_step(ways: Sequence[str]) -> str:
    """State how many times units are copied in each direction."""
    return f"Copies of units: {ways.count(TO_DEVICE)} to the device, {ways.count(TO_HOST)} to the host"


def fits_from(needed_bytes: Mapping[int, float], device_bytes: float) -> str:
    """State how many ranks it takes for a rank's bytes to fit on its device."""
    too_few = [ranks for ranks, needed in needed_bytes.items() if needed > device_bytes]
    enough = [ranks for ranks in needed_bytes if ranks > max(too_few, default=0)]
    if not enough:
        return f"Doesn't fit {device_bytes / GB:.0f} GB on {format_count(max(needed_bytes), 'rank')}"
    return f"Fits {device_bytes / GB:.0f} GB on {format_count(min(enough), 'rank')} or more"


def errors_within(errors: Sequence[float], bound: float) -> str:
    """State how many predictions are within `bound` of the measurement, and how far off the worst one is."""
    within = sum(round(abs(error), 6) <= bound for error in errors)
    worst = max(abs(error) for error in errors)
    return f"{within} of {len(errors)} peaks within {_percent(bound)}; the worst is {_percent(worst, 1)} off"


def _percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f}%"
