"""Find the cards of notebook 11 that fit an error message: `python -m fsdp_helpers explain "MESSAGE"`."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

MOST_CARDS = 3
LEAST_SCORE = 0.35  # of a line's words, weighted by how rare they are; below it, nothing is known
FEWEST_WORDS = 3  # that a description and a card must share; fewer are chance
QUOTED = 10.0  # what a whole quoted message counts more than likeness
WORD = re.compile(r"[a-z_][a-z0-9_.]*[a-z0-9_]|[a-z]")
IN_EVERY_OUTPUT = "crash-no-traceback"  # torchrun's report comes with each failure; what else is known says more
ENDING = re.compile(r"(?<=\w{3})(ing|ed|es|e|s)$")  # "hangs" is "hang", and "decreasing" is "decrease"
PAGE = "notebooks/11_when_it_breaks.ipynb"


@dataclass(frozen=True)
class Match:
    """A card that matches, how well, and the phrase it was found by."""

    name: str
    score: float
    phrase: str


def read_message(words: Sequence[str]) -> str:
    """Return the message from the command line or, without one, from a pipe; ValueError if there is none."""
    text = " ".join(words) if words or sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise ValueError("explain: give a message in quotation marks, or pipe an output in")
    return text


def explain_text(text: str) -> str:
    """Return the matching cards as text, best first, each with its fix; or say that there is none."""
    from fsdp_helpers.teaching.failures.gallery import GALLERY

    matches = find_cards(text)
    if not matches:
        return f"No card matches this message. {PAGE} has an index by what you see; `doctor` checks the machine."
    parts = []
    for match in matches[:MOST_CARDS]:
        card = GALLERY[match.name]
        parts.append(
            f"{card.name}: {card.title}\n  seen as:  {match.phrase}\n  why:      {card.why}\n  tell:     {card.tell}"
        )
        parts.append(f"  fix:      {card.fix}\n  card:     {PAGE}#{card.name}\n")
    return "\n".join(parts).rstrip()


def find_cards(text: str) -> list[Match]:
    """Return the cards that match a message or a full output, best first.

    If the text contains a message from the index, that counts most, the longer the better. Otherwise, each line is
    compared with each phrase of the index by the words they share; rare words count more.
    """
    lines = [line for line in text.splitlines() if line.strip()] or [text]
    bags = [bag for line in lines if (bag := words_of(line))]
    whole = " ".join(normalized(text).split())
    described = words_of(text)
    found = []
    for name, phrases in phrases_of_cards().items():
        score, phrase = max((score_of(phrase, whole, bags), phrase) for phrase in phrases)
        score += covered(described, name)
        if name == IN_EVERY_OUTPUT:
            score = min(score, QUOTED)
        if score >= LEAST_SCORE:
            found.append(Match(name, score, phrase))
    return sorted(found, key=lambda match: -match.score)


def score_of(phrase: str, whole: str, bags: Iterable[frozenset[str]]) -> float:
    """Return how well a phrase matches: above QUOTED if the text contains it, else the best likeness of a line, up to 1."""
    wanted = normalized(phrase)
    if len(wanted) >= 8 and wanted in whole:
        return QUOTED + len(wanted) / 1000 + weight(words_of(phrase))
    return max((likeness(words_of(phrase), bag) for bag in bags), default=0.0)


def covered(described: frozenset[str], name: str) -> float:
    """Return how much of a description a card's own text covers, from 0 to 1: the weight of the words that both have."""
    both = described & words_of_card(name)
    return weight(both) / weight(described) if len(both) >= FEWEST_WORDS else 0.0


def likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the weight of the words in common, relative to both, from 0 to 1; a single one of several is chance."""
    both = weight(one) * weight(other)
    is_chance = len(one & other) < min(2, len(one), len(other))
    return 0.0 if is_chance or not both else weight(one & other) / math.sqrt(both)


def weight(words: Iterable[str]) -> float:
    return sum(rarity().get(word, rarity()[""]) for word in words)


@cache
def rarity() -> dict[str, float]:
    """Return each word's weight: the logarithm of how few phrases have it. "" stands for words that aren't in any."""
    bags = [words_of(phrase) for phrases in phrases_of_cards().values() for phrase in phrases]
    counts = Counter(word for bag in bags for word in bag)
    return {word: math.log(1 + len(bags) / count) for word, count in counts.items()} | {
        "": 0.25 * math.log(1 + len(bags))
    }


@cache
def phrases_of_cards() -> dict[str, tuple[str, ...]]:
    """Return, for each card, the phrases it can be found by: its rows in the index, and its title."""
    from fsdp_helpers.teaching.failures.gallery import GALLERY
    from fsdp_helpers.teaching.failures.sights import SIGHTS

    return {name: (*(sight.text for sight in SIGHTS[name]), card.title) for name, card in GALLERY.items()}


@cache
def words_of_card(name: str) -> frozenset[str]:
    """Return the words of all that a card says, its rows in the index among them."""
    from fsdp_helpers.teaching.failures.gallery import GALLERY

    card = GALLERY[name]
    return words_of(" ".join([*phrases_of_cards()[name], card.why, card.tell, card.fix]))


@cache
def words_of(text: str) -> frozenset[str]:
    """Return the informative words, without endings: no numbers, no words that occur everywhere."""
    return frozenset(
        ENDING.sub("", word)
        for word in WORD.findall(text.lower().replace("oom", "out of memory"))
        if word not in COMMON
    )


def normalized(text: str) -> str:
    """Return lowercase text, with # for each number and single spaces."""
    return re.sub(r"\d+", "#", " ".join(text.lower().split()))


COMMON = frozenset(
    "a an and are as at be but by for from in into is it its me my not of on or our so than that the their then there "
    "they this to was we were when while with you your has have had i if no do does did can error runtimeerror file "
    "line torch py module name named".split()
)
