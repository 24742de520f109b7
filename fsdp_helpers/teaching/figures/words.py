"""The drawings in words, for readers who cannot see them: what lies where, and in which order, as one would say it."""

from collections.abc import Iterator, Mapping, Sequence

from fsdp_helpers.checkpointing.index import TensorEntry
from fsdp_helpers.measuring.unit_trace import UnitTrace
from fsdp_helpers.planning.streams import Span
from fsdp_helpers.quantities import in_mb
from fsdp_helpers.teaching.figures.stages import NOTHING, OWN, SHARD, WHOLE, Stage

PHRASES = {
    WHOLE: "every rank has all {name}",
    OWN: "every rank has all {name}, of its own images only",
    NOTHING: "there are no {name}",
}
STATE_NAMES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}


def step_in_words(stages: Sequence[Stage], num_ranks: int) -> str:
    """Say stage by stage what the ranks have, and what leads from each to the next."""
    return " ".join(_stage_in_words(number, stage, num_ranks) for number, stage in enumerate(stages, start=1))


def _stage_in_words(number: int, stage: Stage, num_ranks: int) -> str:
    phrases = [_state_in_words(kind, getattr(stage, kind), num_ranks) for kind in STATE_NAMES]
    joined = "; ".join(dict.fromkeys(phrases))
    told = f"Stage {number}, {stage.title}: {joined}."
    link = stage.leads_to.replace("-\n", "-")
    return f"{told} Next: {link}." if link else told


def _state_in_words(kind: str, has: str, num_ranks: int) -> str:
    name = STATE_NAMES[kind]
    if has != SHARD:
        return PHRASES[has].format(name=name)
    if num_ranks == 2:
        return f"rank 0 has the left half of the {name}, rank 1 the right half"
    return f"each of {num_ranks} ranks has its own shard of the {name}, and no other"


def step_of_units_in_words(step: UnitTrace) -> str:
    """Say what a traced step shows: the units, what happens to each, and the memory of rank 0."""
    seen = step.ranks[0]
    curve, below = seen.trace.curve, [unit.name for unit in step.units[1:]]
    names = f"{len(step.units)} units, the root and {_listed(below)}" if below else "one unit"
    told = [
        f"One step of FSDP on two ranks, {step.model} in {names}, traced over {1e3 * step.length_s:.0f} ms.",
        f"Between steps rank 0 has the left half of every tensor, rank 1 the right half: {in_mb(curve.held_bytes)} MB.",
        "In forward an all-gather brings each unit's halves together on both ranks"
        + (", and after its forward the unit is freed again, but for the root." if below else "."),
        "In backward "
        + ("each unit is gathered once more, the last one first; " if below else "")
        + "whole gradients of the rank's own images appear, and a reduce-scatter leaves each rank its half of their mean.",
        f"Rank 0 has at most {in_mb(curve.peak_bytes)} MB.",
    ]
    return " ".join(told)


def units_in_words(units: Sequence[str]) -> str:
    """Say when each unit is unsharded, and when it has full gradients."""
    root, *below = units
    backward = list(reversed(below))
    told = [
        f"One rank, one step, in time. Forward runs through {_listed(below)}, backward through {_listed(backward)}.",
        f"The root, {root}, stays unsharded from the first moment to the last. Its head's gradients are there from the "
        "beginning of backward, and wait for the others: the root is reduced last.",
        "Each other unit is unsharded while its own forward runs, resharded, and unsharded again for its backward.",
    ]
    if len(backward) > 1:
        told.append(
            f"In backward {_listed(backward[1:])} {'are' if len(backward) > 2 else 'is'} unsharded one unit early, "
            "while backward is still in the unit before."
        )
    return " ".join(
        [*told, "A unit below the root has full gradients only during its own backward, next to its full parameters."]
    )


def streams_in_words(choices: Mapping[str, Sequence[Span]], given: str) -> str:
    """Say for each choice when the arithmetic waits, and when the step ends, in ms."""
    told = [f"Two queues of a GPU, arithmetic and communication, computed from {given}."]
    for name, spans in choices.items():
        end_s = max(span.end_s for span in spans)
        busy_s = sum(span.end_s - span.start_s for span in spans if span.what in ("forward", "backward"))
        told.append(
            f"{name}: the step takes {1e3 * end_s:.1f} ms, in which the arithmetic works for {1e3 * busy_s:.1f} ms and "
            f"waits for {1e3 * (end_s - busy_s):.1f} ms."
        )
    return " ".join(told)


def shards_in_words(entries: Sequence[TensorEntry]) -> str:
    """Say for each tensor which rank wrote how many of its rows, from first to last."""
    return " ".join(f"{entry.name}: {_listed(list(_written(entry)))}." for entry in entries)


def _written(entry: TensorEntry) -> Iterator[str]:
    for part in entry.shards:
        if entry.shape:
            yield f"rank {part.rank} wrote {part.sizes[0]:,} row{'s' * (part.sizes[0] != 1)}"
        else:
            yield f"rank {part.rank} wrote it"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
