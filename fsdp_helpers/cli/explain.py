"""Find the cards in notebook 11 that match an error message: `python -m fsdp_helpers explain "MESSAGE"`."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nlargest
from itertools import pairwise

from fsdp_helpers.teaching.failures.texts import TEXTS

MOST_CARDS = 3
LEAST_SCORE = 0.5  # a card that scores lower doesn't match
FEWEST_WORDS = 3  # that a description and a card must have in common; fewer may be a coincidence
QUOTED = 10.0  # how much more a full quoted message counts than shared words
SHORTEST_QUOTE = 8  # characters
KIND = {"hang": "hang", "memory": "memory", "slow": "slow"}  # a card's kind -> the word for it in a message
# How much more a card counts if it's of the kind that the text names, and how much less if it's of a different kind.
SAME_KIND = 1.3
SECOND = 0.5  # how much a card's second-best phrase counts, relative to its best
FULL_TEXT = 2.0  # how much a card's full text counts, relative to its best phrase
UNKNOWN_WORD = 1.0  # the weight of a word that's on no card, about that of a word on half of the cards
WORD = re.compile(r"[a-z_][a-z0-9_.]*[a-z0-9_]|[a-z]")
# These cards' messages accompany other cards' messages, which are more informative.
WRAPPERS = ("crash-no-traceback", "slow-threads", "crash-nccl-system-error")
EXIT_CODE = re.compile(r"\b(?:exit|return)[ -]?(?:code|status)\s*[:=]?\s*(-?\d+)")
ENDING = re.compile(r"(?<=\w{3})(ing|ed|es|e|s)$")
PAGE = "notebooks/11_when_it_breaks.ipynb"


@dataclass(frozen=True)
class Match:
    """A matching card, its score, and the phrase that matched."""

    name: str
    score: float
    phrase: str


def read_message(words: Sequence[str]) -> str:
    """Return the message from the command line or, without one, from a pipe. Raises ValueError if it's empty."""
    text = " ".join(words) if words or sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise ValueError("explain: give a message in quotation marks, or pipe one in")
    return text


def explain_text(text: str) -> str:
    """Return the matching cards as text, best first, each with its fix; or a sentence saying there are none."""
    matches = find_cards(text)
    if not matches:
        return f"No card matches this message. {PAGE} has an index of symptoms; `doctor` checks the machine."
    parts = []
    for match in matches[:MOST_CARDS]:
        card = TEXTS[match.name]
        parts.append(
            f"{match.name}: {card.title}\n  seen as:  {match.phrase}\n  why:      {card.why}\n  tell:     {card.tell}"
        )
        parts.append(f"  fix:      {card.fix}\n  card:     {PAGE}#{match.name}\n")
    return "\n".join(parts).rstrip()


def find_cards(text: str) -> list[Match]:
    """Return the cards that match a message or a full output, best first.

    A message from the index that occurs in the text counts most, especially if the message is long or has rare
    words. Otherwise, each line is compared with each phrase in the index, and the full text with a card's full text, by
    the words they have in common. Rare words count more, and a pair of neighboring words counts as one more word.
    """
    lines = [words for line in text.splitlines() if (words := words_of(line))]
    whole, described = normalized(text), frozenset().union(*lines)
    found = []
    for name, phrases in phrases_of_cards().items():
        score, phrase = best_of(phrases, whole, lines)
        score += FULL_TEXT * covered(described, name)
        if kind := KIND.get(name.partition("-")[0]):
            score *= SAME_KIND if kind in described else 1 / SAME_KIND
        if name in WRAPPERS:
            score = min(score, QUOTED)
        if score >= LEAST_SCORE:
            found.append(Match(name, score, phrase))
    return sorted(found, key=lambda match: -match.score)


def best_of(phrases: Sequence[str], whole: str, lines: Sequence[frozenset[str]]) -> tuple[float, str]:
    """Return a card's score (above QUOTED if a phrase is in the text, otherwise at most 1.5) and its best phrase."""
    quoted = [phrase for phrase in phrases if is_quote(phrase) and normalized(phrase) in whole]
    if quoted:
        words = frozenset().union(*(words_of(phrase) for phrase in quoted))
        return QUOTED + weight(words), max(quoted, key=len)
    alike = [(max(likeness(words_of(phrase), line) for line in lines or [frozenset()]), phrase) for phrase in phrases]
    (best, phrase), (second, _) = nlargest(2, [*alike, (0.0, "")])
    return best + SECOND * second, phrase


def is_quote(phrase: str) -> bool:
    """Return True if a phrase is long enough to be searched for literally."""
    return len(normalized(phrase)) >= SHORTEST_QUOTE


def covered(described: frozenset[str], name: str) -> float:
    """Return how much of a description a card covers, from 0 to 1; words found only in the explanation count half."""
    seen, said = words_of_card(name)
    shared = described & seen
    if len({word for word in described & (seen | said) if " " not in word}) < FEWEST_WORDS:
        return 0.0
    return (weight(shared) + weight(described & said - seen) / 2) / weight(described)


def likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the weighted overlap between two texts' words, from 0 to 1; 0 if they share only one word of several."""
    both = weight(one) * weight(other)
    is_chance = len(one & other) < min(2, len(one), len(other))
    return 0.0 if is_chance or not both else weight(one & other) / math.sqrt(both)


def weight(words: Iterable[str]) -> float:
    """Return the sum of the words' weights; a pair of neighbors counts half, or nothing if no card has it."""
    return sum(rarity().get(word, 0.0) / 2 if " " in word else rarity().get(word, UNKNOWN_WORD) for word in words)


@cache
def rarity() -> dict[str, float]:
    """Return the weight of each word on the cards: the fewer cards contain it, the higher its weight."""
    cards = [frozenset().union(*words_of_card(name)) for name in phrases_of_cards()]
    counts = Counter(word for words in cards for word in words)
    return {word: math.log(1 + len(cards) / count) for word, count in counts.items()}


@cache
def phrases_of_cards() -> dict[str, tuple[str, ...]]:
    """Return the phrases by which each card can be found: its rows in the index, and its title."""
    return {name: (*(row.text for row in card.rows()), card.title) for name, card in TEXTS.items()}


@cache
def words_of_card(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words in a card's index rows and title, and separately the words in its explanation."""
    card = TEXTS[name]
    seen = frozenset().union(*(words_of(phrase) for phrase in phrases_of_cards()[name]))
    return seen, words_of(" ".join([card.why, card.tell, card.fix]))


@cache
def words_of(text: str) -> frozenset[str]:
    """Return the word stems in a text and its pairs of neighboring stems, without numbers and very common words."""
    words = [SAME.get(word, word) for word in map(stem, WORD.findall(text.lower())) if word not in COMMON]
    return frozenset(words) | {f"{one} {next_one}" for one, next_one in pairwise(words)}


def stem(word: str) -> str:
    """Return a word without its ending: "hangs" becomes "hang", and "decreasing" becomes "decreas"."""
    return word if word in COMMON else ENDING.sub("", word)


def normalized(text: str) -> str:
    """Return the text in lowercase, with single spaces, exit codes as in Python, and # for all other numbers."""
    text = EXIT_CODE.sub(lambda found: f"exit code {signal_of(int(found[1]))}", " ".join(text.lower().split()))
    return re.sub(r"(?<![-\d])(?<!exit code )\d+|(?<=-)\d{3,}", "#", text)


def signal_of(code: int) -> int:
    """Return an exit code in Python's form: -9 for the shell's 137, which is 128 plus the signal."""
    return 128 - code if 128 < code < 160 else code


COMMON = frozenset(
    "a an and are as at be but by for from in into is it its me my not of on or our so than that the their then there "
    "they this to was we were when while with you your has have had i if no do does did can error runtimeerror file "
    "line torch py module name named use using used get got will would which any some also just only after before all "
    "try trying way how what why like same issue problem code run running set please help cannot import importerror out".split()
)
# Words that people use -> the cards' word for the same thing; all without endings.
SAME = {
    said: word
    for word, others in {
        "hang": "freez froz frozen stuck stall halt deadlock lock dead block forever indefinitely wait hung idl unrespons",
        "memory": "oom outofmemoryerror ram vram mem",
        "train": "finetun fine-tun",
        "sav": "stor dump",
        "nod": "machin host multi-nod multinod server",
        "gpu": "multi-gpu multigpu",
        "rank": "process",
        "slow": "slower slowly slowdown",
        "nan": "nans inf",
        "checkpoint": "ckpt snapshot",
        "resum": "restart continu restor reload",
        "decreas": "converg learn improv drop",
        "evaluat": "validat valid validation evaluation eval inferenc test val",
        "accuracy": "accuraci metric score acc",
        "grow": "increas ris leak",
        "start": "begin startup",
        "end": "finish complet",
        "differ": "different differenc",
        "sampl": "exampl imag video record item",
        "container": "docker pod kubernet k8s",
        "crash": "fail abort",
        "data": "dataset",
        "loader": "dataloader",
        "gather": "allgather all_gather",
        "reduc": "allreduc all_reduc",
        "ddp": "distributeddataparallel",
        "fsdp": "fullyshardeddataparallel fsdp1 fsdp2",
        "rate": "lr",
        "parameter": "param",
        "gradient": "grad",
        "second": "sec",
    }.items()
    for said in others.split()
}
