"""Comparing the ranks' records, and saying what was found."""

import os
from collections.abc import Iterator, Sequence

from fsdp_helpers.field_guide import FOLDER, cards
from fsdp_helpers.inspecting.watch import Note, Record
from fsdp_helpers.quantities import format_count

SUBJECTS = (
    "optimizer",
    "starting values",
    "batches",
    "samplers",
    "losses",
    "units",
    "dropout",
    "clipping",
    "schedule",
    "loading",
    "saving",
)


def findings(records: Sequence[Record]) -> dict[str, str]:
    """Return the evidence for each card that the ranks found or that a comparison of their facts shows."""
    found: dict[str, str] = {}
    for record in records:
        for card in record.findings:
            if card not in found:
                found[card] = by_rank([(rank, r.findings.get(card)) for rank, r in enumerate(records)])
    for notes in (*compared(records, "agree", lambda values: len(values) > 1), *compared(records, "differ", is_same)):
        found.setdefault(notes[0].card, by_rank(list(enumerate(notes))))
    return found


def is_same(values: set) -> bool:
    return len(values) == 1


def compared(records: Sequence[Record], kind: str, is_finding) -> Iterator[list[Note]]:
    """Yield the ranks' notes of each fact that all ranks have and whose values are a finding."""
    if len(records) < 2:
        return
    for key in getattr(records[0], kind):
        notes = [getattr(record, kind).get(key) for record in records]
        if all(notes) and is_finding({note.value for note in notes}):
            yield notes


def by_rank(notes: Sequence[tuple[int, Note | None]]) -> str:
    """Return what the ranks say, each sentence once, with the ranks that say it and the script's line."""
    said: dict[tuple[str, str], list[str]] = {}
    for rank, note in notes:
        if note:
            said.setdefault((note.text, note.line), []).append(str(rank))
    if len(said) == 1 and len(notes) == sum(map(len, said.values())):
        return "; ".join(f"{text} ({line})" for text, line in said)
    return "; ".join(f"rank {', '.join(ranks)}: {text} ({line})" for (text, line), ranks in said.items())


def report(script: str, records: Sequence[Record]) -> str:
    """Return the report: a line per finding, then what was looked at, and what wasn't to be seen."""
    found, seen = findings(records), records[0].seen
    ranks, steps = format_count(len(records), "CPU rank"), format_count(seen["optimizer"], "optimizer step")
    lines = [f"{script} on {ranks}, {steps}: {format_count(len(found), 'finding') if found else 'no findings'}"]
    for card, evidence in found.items():
        path = os.path.relpath(FOLDER / cards()[card].file)
        lines.append(f"- {cards()[card].title}: {evidence}. {path}")
    lines.append(f"looked at: {', '.join(one for one in SUBJECTS if seen[one]) or 'nothing'}")
    if missing := [one for one in SUBJECTS if not seen[one]]:
        lines.append(f"didn't get to see: {', '.join(missing)}")
    for rank, record in enumerate(records):
        lines += [f"the probe {name} failed on rank {rank}: {why}" for name, why in record.troubles.items()]
        lines += [f"rank {rank} {record.end}"] if record.end else []
    return "\n".join(lines)
