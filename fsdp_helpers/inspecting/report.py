"""Comparing the ranks' records, and saying what was found."""

import os
from collections.abc import Sequence

from fsdp_helpers.field_guide import FOLDER, cards
from fsdp_helpers.inspecting.watch import Note, Record
from fsdp_helpers.quantities import format_count

SUBJECTS = "starting values", "batches", "samplers", "losses", "clipping", "units", "BatchNorm in evaluation", "saving"


def findings(records: Sequence[Record]) -> dict[str, str]:
    """Return the evidence for each card that any rank found, or that a comparison of the ranks' values shows."""
    found: dict[str, str] = {}
    for kind, card, key in dict.fromkeys(key for record in records for key in record.notes):
        notes = [record.notes.get((kind, card, key)) for record in records]
        if card not in found and is_finding(kind, notes):
            found[card] = by_rank(notes)
    return found


def is_finding(kind: str, notes: Sequence[Note | None]) -> bool:
    if kind == "finding":
        return True
    num_values = len({note.value for note in notes if note})
    return len(notes) > 1 and all(notes) and (num_values > 1 if kind == "same" else num_values == 1)


def by_rank(notes: Sequence[Note | None]) -> str:
    """Return what the ranks say, each sentence once, with the script's line, and the ranks unless all say the same."""
    said: dict[str, list[str]] = {}
    for rank, note in enumerate(notes):
        if note:
            said.setdefault(f"{note.text} ({note.line})", []).append(str(rank))
    if len(said) == 1 and all(notes):
        return next(iter(said))
    return "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items())


def report(script: str, records: Sequence[Record]) -> str:
    """Return the report: a line per finding, then what was looked at, and what wasn't to be seen."""
    found, first = findings(records), records[0]
    ranks, steps = format_count(len(records), "CPU rank"), format_count(first.num_steps, "optimizer step")
    lines = [f"{script} on {ranks}, {steps}: {format_count(len(found), 'finding') if found else 'no findings'}"]
    for card, evidence in found.items():
        path = os.path.relpath(FOLDER / cards()[card].file)
        lines.append(f"- {cards()[card].title}: {evidence}. {path}")
    lines.append(f"looked at: {', '.join(one for one in SUBJECTS if one in first.seen) or 'nothing'}")
    if missing := [one for one in SUBJECTS if one not in first.seen]:
        lines.append(f"didn't get to see in {steps}: {', '.join(missing)}")
    for rank, record in enumerate(records):
        lines += [f"the probe {name} failed on rank {rank}: {why}" for name, why in record.troubles.items()]
        lines += [f"rank {rank} {record.end}"] if record.end else []
    return "\n".join(lines)
