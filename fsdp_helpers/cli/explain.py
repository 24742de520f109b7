"""Find the failures that an error message belongs to: `python -m fsdp_helpers explain "MESSAGE"`."""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from fsdp_helpers.card_search import Index, Match, is_ordinary
from fsdp_helpers.field_guide import FOLDER, cards

NO_CARD = "No card matches this message. {} lists the failures by symptom; `doctor` checks the machine."
GUESSES = "No card quotes this message. The closest by words:"
MORE_GUESSES = "Others that have words of this message, but don't quote it:"
ORDINARY = "Other bugs and other programs say the same. If it's your training on several ranks that says it:"
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
WIDTH, LABEL = 118, 15


def read_message(words: Sequence[str]) -> str:
    """Return the message from the command line or, without one, from a pipe. Raises ValueError if it's empty."""
    text = " ".join(words) if words or sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise ValueError("explain: give a message in quotation marks, or pipe one in")
    return text


def find_cards(text: str) -> list[Match]:
    """Return at most three cards that match a message, best first."""
    return Index(cards()).find(text)


def explain_text(text: str, matches: Sequence[Match]) -> str:
    """Return the matching cards as text, with quotes and guesses told apart; or a sentence saying there are none."""
    if not matches:
        return NO_CARD.format(os.path.relpath(FOLDER / "README.md"))
    return "\n\n".join(paragraphs(text, matches))


def paragraphs(text: str, matches: Sequence[Match]) -> Iterator[str]:
    if is_ordinary(text, matches[0].quote):
        yield ORDINARY
    quoted = [match for match in matches if match.quote]
    if not quoted:
        yield GUESSES
    yield from map(card_text, quoted or matches)
    if quoted and (others := matches[len(quoted) :]):
        yield "\n".join([MORE_GUESSES, *(f"  {match.card.name}: {match.card.title}" for match in others)])


def card_text(match: Match) -> str:
    """Return a card for a terminal: its title, the phrase in the message, why, how to tell, the fix, and its file."""
    card, path = match.card, os.path.relpath(FOLDER / match.card.file)
    parts = {
        "seen as": match.quote,
        "why": card.part("Why"),
        "how to tell": card.part("How to tell"),
        "fix": card.part("The fix"),
        "run it" if card.code else "card": f"torchrun --nproc-per-node 2 {path}" if card.code else path,
    }
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * LABEL, break_long_words=False, break_on_hyphens=False)
    lines = [f"{card.name}: {card.title}"]
    for label, said in parts.items():
        if said:
            wrapper.initial_indent = f"  {label}:".ljust(LABEL)
            lines.append(wrapper.fill(LINK.sub(r"\1", said.strip())))
    return "\n".join(lines)
