"""Find the cards that match a message: those that quote it, then those with its words (SQLite's full-text search)."""

import math
import re
import sqlite3
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

from fsdp_helpers.field_guide import Card, cards

MOST_CARDS = 3
SHORTEST_QUOTE = 8  # characters
WEIGHTS = (0, 3, 4, 1)  # of a word in a card's name, title, rows under "Also seen as", and explanation
FEWEST_WORDS, LEAST_SCORE = 3, 5.0  # that a guess and a message have in common, and its BM25; less may be a coincidence
LAST_CHARACTERS = 2000  # of a long output, whose words are compared
WORD = re.compile(r"[a-z_][a-z0-9_.]*[a-z0-9_]|[a-z]")
COMMON = frozenset(
    "a an and are as at be but by for from in into is it its me my not of on or our so than that the their then there "
    "they this to was we were when while with you your has have had i if no do does did can error runtimeerror file "
    "line torch py module name named use using used get got will would which any some also just only after before all "
    "try trying way how what why like same issue problem code run running set please help cannot import importerror out".split()
)
# Without one of these, a message isn't about training on several processes, unless a card quotes it.
FIELD = re.compile(
    r"\b(fsdp\w*|fully_?shard\w*|ddp|dtensors?|shard\w*|nccl\w*|gloo|torch(run|elastic)?|\w*distributed\w*|ranks?|\w*gpus?|"
    r"cuda|nodes?|slurm|epochs?|batch\w*|loss(es)?|grad(ient)?s?|norm|train(ed|ing|er|s)?|resum\w+|checkpoint\w*|models?|"
    r"optimizers?|tensors?|parameters?|layers?|lora|accuracy|learning rate|validation|evaluation|dataset|sampler|\w*loader|oom|"
    r"accelerat(e|or)|deepspeed|ckpts?|distcp)\b(?!\.py)"
)
EXCEPTION = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception))(?=:|\(|$)", re.MULTILINE)
# Any bug of a model says these, too, or any program does. With a second sign, sharding is the likely cause.
ORDINARY = re.compile(
    r".*(must match the size of tensor b|mat1 and mat2 shapes|error\(s\) in loading state_dict|size mismatch|all tensors to be "
    r"on the same device|cuda kernel errors might be asynchronously).*|(\w*error: )?(\[errno \d+\] ?)?(address already in use|"
    r"broken pipe|cannot allocate memory|connection (refused|reset by peer|timed out)|disk quota exceeded|no space left on device|"
    r"resource temporarily unavailable|segmentation fault( \(core dumped\))?|too many open files|outofmemoryerror|isadirectoryerror)|"
    r"oserror: \[errno \d+\]|eaddrinuse( \(address already in use\))?"
)
SECOND_SIGN = re.compile(
    r"dtensor|fsdp|shard|\bmodule\.(?!py\b)|_orig_mod|optim|\bddp\b|distributed|nccl|\brank ?\d|world_size|parallel"
)
# Their messages accompany those of other cards, which tell more.
ACCOMPANYING = ("crash-no-traceback", "crash-nccl-system-error", "slow-threads")
EXIT_CODE = re.compile(r"\b(?:exit|return)[ -]?(?:code|status)\s*[:=]?\s*(-?\d+)")
OUT_OF_MEMORY, OOM_FRAGMENTED = "memory-activations", "memory-fragmented"  # the general card, and that of one cause
LEAST_FRAGMENTED = 0.1  # of a GPU's memory, reserved by PyTorch but unallocated
SIZE, UNITS = r"([\d.]+) ([KMG]iB)", {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Match:
    """A card that matches a message, and the card's longest phrase in it: "" if only words match."""

    card: Card
    quote: str = ""


class Index:
    """The cards in a full-text index in memory, with English stems and BM25 scores."""

    def __init__(self, cards: dict[str, Card]) -> None:
        self.cards, self.names_with, self.database = cards, cache(self._names_with), sqlite3.connect(":memory:")
        phrases = [(card.name, phrase) for card in cards.values() for phrase in (card.title, *card.messages())]
        self.phrases = [(*row, normalized(row[1])) for row in phrases if len(row[1]) >= SHORTEST_QUOTE]
        self.everything = "\n".join(card.text for card in cards.values())
        stems = "porter unicode61 tokenchars '_'"
        self.database.execute(
            f'create virtual table card using fts5(name unindexed, title, seen, text, tokenize="{stems}")'
        )
        for card in cards.values():
            explanation = "\n".join(map(card.part, ("Why", "How to tell", "The fix")))
            row = card.name, card.title, "\n".join(card.rows()), explanation
            self.database.execute("insert into card values (?, ?, ?, ?)", row)

    def find(self, text: str) -> list[Match]:
        """Return at most three cards, best first: those that quote the text, then those that have its words."""
        quotes = self.quotes(text)
        scores = self.scores(text) if quotes or self.is_of_the_field(text) else {}
        told = {name: sum(map(self.rarity, words_of(" ".join(found)))) for name, found in quotes.items()}
        weak = {name: all(ORDINARY.fullmatch(normalized(phrase)) for phrase in found) for name, found in quotes.items()}
        causes_first = {name: (name in ACCOMPANYING, weak[name], name == OUT_OF_MEMORY) for name in told}
        quoted = sorted(told, key=lambda name: (causes_first[name], -told[name] - 0.2 * scores.get(name, 0.0)))
        guesses = sorted(scores.keys() - told.keys(), key=scores.get, reverse=True)
        names = [*quoted, *guesses][:MOST_CARDS]
        return [Match(self.cards[name], max(quotes.get(name, [""]), key=len)) for name in names]

    def quotes(self, text: str) -> dict[str, list[str]]:
        """Return each card's phrases that occur in the text, apart from numbers and spaces."""
        whole, found = normalized(text), defaultdict(list)
        signs = FIELD.search(whole) or SECOND_SIGN.search(whole) or ORDINARY.fullmatch(whole)
        for name, phrase, searched in self.phrases:
            if searched in whole and (signs or not ORDINARY.fullmatch(searched)):
                found[name].append(phrase)
        if unallocated_share(text) < LEAST_FRAGMENTED:
            found.pop(OOM_FRAGMENTED, None)
        return found

    def scores(self, text: str) -> dict[str, float]:
        """Return the BM25 scores of the cards that have enough of the text's words."""
        words = words_of(text[-LAST_CHARACTERS:])
        query = " OR ".join(f'"{word}"' for word in words) or '""'
        select = f"select name, -bm25(card, {', '.join(map(str, WEIGHTS))}) from card where card match ?"
        scores = dict(self.database.execute(select, (query,)))
        shared = Counter(name for word in words for name in self.names_with(word))
        return {name: score for name, score in scores.items() if shared[name] >= FEWEST_WORDS and score >= LEAST_SCORE}

    def is_of_the_field(self, text: str) -> bool:
        """Return False without a word of the field, or if no card names any of the exceptions (and their libraries)."""
        raised = [(name.partition(".")[0], name.rpartition(".")[2]) for name in EXCEPTION.findall(text)]
        known = [names for names in raised if all(re.search(rf"\b{name}\b", self.everything) for name in names)]
        return bool(FIELD.search(text.lower()) and (known or not raised))

    def rarity(self, word: str) -> float:
        """Return how much a word tells: the fewer cards have it, the more."""
        return math.log(1 + len(self.cards) / max(1, len(self.names_with(word))))

    def _names_with(self, word: str) -> frozenset[str]:
        found = self.database.execute("select name from card where card match ?", (f'"{word}"',))
        return frozenset(name for (name,) in found)


def words_of(text: str) -> list[str]:
    """Return the words in a text, each once, without numbers and very common words."""
    return [word for word in dict.fromkeys(WORD.findall(text.lower())) if word not in COMMON]


def normalized(text: str) -> str:
    """Return the text in lowercase, with single spaces, exit codes as in Python, and # for all other numbers."""
    codes = {str(128 + signal): -signal for signal in range(1, 32)}  # the shell's 137 is -9
    text = EXIT_CODE.sub(lambda found: f"exit code {codes.get(found[1], found[1])}", " ".join(text.lower().split()))
    return re.sub(r"(?<![-\d])(?<!exit code )(?<!errno )\d+|(?<=-)\d{3,}", "#", text)


def unallocated_share(text: str) -> float:
    """Return how much of a GPU's memory PyTorch had reserved but not allocated, according to an out-of-memory message."""
    found = re.search(f"total capaci?ty of {SIZE}.*?{SIZE} is reserved by PyTorch but unallocated", text, re.DOTALL)
    total, idle = [float(found[at]) * UNITS[found[at + 1]] for at in (1, 3)] if found else (1.0, 0.0)
    return idle / total


def is_ordinary(text: str, quote: str) -> bool:
    """Return whether others say what a card quotes of a text, and no second sign shows that sharding is the cause."""
    return bool(ORDINARY.fullmatch(normalized(quote)) and not SECOND_SIGN.search(text.lower()))


def point_to_card(result: Any) -> None:
    """Below a failed cell, whose IPython `result` this is, link to the card that quotes its error, if there's one."""
    error = result.error_in_exec
    if not isinstance(error, Exception):  # it ran, or was interrupted
        return
    said = getattr(error, "summary", None) or "".join(traceback.format_exception_only(error))
    match = next(iter(Index(cards()).find(said)), None)
    if match and match.quote and not is_ordinary(said, match.quote):
        from IPython.display import display

        title, link = match.card.title, f"failures/{match.card.file}"
        texts = {"text/plain": f"The guide of failures: {title} ({link})"}
        display(texts | {"text/markdown": f"The guide of failures: [{title}]({link})"}, raw=True)
