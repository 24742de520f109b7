"""Show what a cell that began with `%%ranks --trace` did: a figure, and a table of its collectives."""

from collections.abc import Mapping
from math import isinf

import matplotlib.pyplot as plt
from IPython.display import display

from fsdp_helpers.measuring.cell_trace import assembled, compared, record_cell
from fsdp_helpers.records import Collective
from fsdp_helpers.teaching.figures.plots import plot_trace
from fsdp_helpers.teaching.figures.style import show_described
from fsdp_helpers.teaching.page.show import table


def show_trace(sent: Mapping[int, list]) -> None:
    """Show what each rank has sent: a figure, and a row for all collectives of one kind, unit and size."""
    traces = compared({rank: assembled(seen) for rank, seen in sent.items()})
    fig, _ = plot_trace(traces)
    show_described(fig)
    plt.close(fig)
    rows: dict[tuple, dict[int, list[Collective]]] = {}
    for rank, trace in traces.items():
        for seen in trace.collectives:
            kind = seen.op.replace("_", "-"), seen.unequal or seen.unit, f"{seen.bytes:,}"
            rows.setdefault(kind, {}).setdefault(rank, []).append(seen)
    cells = [[*kind, *(_times_and_wait(ranks.get(rank, [])) for rank in traces)] for kind, ranks in rows.items()]
    if cells:
        display(table(["collective", "unit", "bytes", *(f"rank {rank}: times, waiting" for rank in traces)], cells))


def _times_and_wait(alike: list[Collective]) -> str:
    if not alike:
        return "–"
    waiting = f"{1e3 * sum(seen.waited_s for seen in alike):.1f} ms"
    return f"{len(alike)}, {'never ended' if isinf(alike[-1].end_s) else waiting}"


TRACER = record_cell, show_trace
