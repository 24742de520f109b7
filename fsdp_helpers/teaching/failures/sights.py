"""The cards' text and the index of symptoms, from the two tables next to this module. Doesn't import torch."""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

MESSAGE, NUMBER, BEHAVIOR = "message", "number", "behavior"
KINDS = {"messages": MESSAGE, "numbers": NUMBER, "behavior": BEHAVIOR}
TABLES = ("sights.toml", "documented.toml")  # cards that are run here; cards from documentation


@dataclass(frozen=True)
class Sight:
    """One row of the index: what you see, and the source of a message that wasn't seen here."""

    kind: str
    text: str
    source: str = ""


@dataclass(frozen=True)
class Card:
    """A card's text and, if the failure isn't run here, its source."""

    title: str
    why: str
    tell: str
    fix: str
    source: str = ""


@cache
def table(name: str) -> dict[str, dict]:
    """Return a table's cards, keyed by name; `name` is the table's file."""
    return tomllib.loads(Path(__file__).with_name(name).read_text("utf-8"))


def rows_of(card: dict) -> tuple[Sight, ...]:
    """Return a card's rows: those seen here, then quoted ones."""
    seen = [Sight(kind, text) for key, kind in KINDS.items() for text in card.get(key, ())]
    quoted = [Sight(MESSAGE, text, source) for source, texts in card.get("quotes", {}).items() for text in texts]
    return (*seen, *quoted)


SIGHTS = {name: rows_of(card) for part in TABLES for name, card in table(part).items()}
CARDS = {
    name: Card(**{part.name: card[part.name] for part in fields(Card) if part.name in card})
    for each in TABLES
    for name, card in table(each).items()
}
