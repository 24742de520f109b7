"""Record what a cell does on each rank, and compare the ranks' collectives."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch

from fsdp_helpers.measuring.memory import MemoryTrace
from fsdp_helpers.records import Collective, MemoryCurve, StepTrace, later


@contextmanager
def record_cell(send: Callable[[str, Any], None], device: torch.device) -> Iterator[None]:
    """Within the block, send each collective as it begins and as it ends; at the end, send the trace of everything.

    So a rank that dies or hangs has said how far it came.
    """
    trace = MemoryTrace(device, held=True, tell=partial(send, "trace"))
    trace.start()
    try:
        yield
    finally:
        trace.stop()
        send("trace", trace.whole())


def assembled(sent: Sequence[Collective | StepTrace]) -> StepTrace:
    """Return the trace that a rank has sent. If the rank ended first, it has the rank's collectives, but no curve."""
    if sent and isinstance(sent[-1], StepTrace):
        return sent[-1]
    collectives = tuple({seen.start_s: seen for seen in sent}.values())  # one that ended replaces the one that began
    trace = StepTrace(curve=MemoryCurve(times_s=(), allocated_bytes=()), collectives=collectives)
    return later(trace, -min([seen.start_s for seen in collectives], default=float("inf")))


def compared(traces: Mapping[int, StepTrace]) -> dict[int, StepTrace]:
    """Return traces whose times count from when the first rank began, and whose collectives have waited for the others.

    The ranks are on one machine, and share its clock. The first collective of a group on one rank belongs to the first
    one of that group on the others, and so on. Messages between two ranks aren't compared.
    """
    began_s = min(trace.began_s for trace in traces.values())
    traces = {  # a rank that ended before it did anything never began
        rank: later(trace, trace.began_s - began_s) if isfinite(trace.began_s) else trace
        for rank, trace in traces.items()
    }
    calls: dict[tuple, dict[int, Collective]] = {}
    keys: dict[int, list[tuple]] = {rank: [] for rank in traces}
    for rank, trace in traces.items():
        counts: Counter = Counter()
        for seen in trace.collectives:
            group = (*seen.group, rank) if seen.op in ("send", "recv") else seen.group
            counts[group] += 1
            keys[rank].append((group, counts[group]))
            calls.setdefault(keys[rank][-1], {})[rank] = seen
    return {
        rank: replace(trace, collectives=tuple(_met(rank, calls[key]) for key in keys[rank]))
        for rank, trace in traces.items()
    }


def _met(rank: int, calls: Mapping[int, Collective]) -> Collective:
    """Return one rank's call of a collective with what the calls of all ranks tell about it."""
    last_s = max(seen.start_s for seen in calls.values())
    said = {other: f"{seen.op} of {seen.shapes}".replace("_", "-") for other, seen in calls.items()}
    unequal = "; ".join(f"rank {other}: {call}" for other, call in said.items())
    own = calls[rank]
    # A rank that only sends may be done before the others come.
    waited_s = min(last_s, own.end_s) - own.start_s
    return replace(own, waited_s=waited_s, unequal=unequal if len(set(said.values())) > 1 else "")
