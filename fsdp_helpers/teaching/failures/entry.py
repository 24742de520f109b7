"""An entry in the gallery: what breaks, what you see, why, and how to fix it. This module doesn't import torch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SYMPTOMS = {
    "hang": "it hangs",
    "crash": "it crashes",
    "memory": "it runs out of memory",
    "wrong": "it trains, but wrongly",
    "slow": "it's slow",
    "save": "it saves, but doesn't resume correctly",
}
CHAPTER = "11_when_it_breaks.ipynb"
Numbers = Mapping[str, float]
RankFunction = Callable[[int, int], Numbers]


MESSAGE, NUMBER, BEHAVIOR = "message", "number", "behavior"  # the kinds of rows in the index
ON_CPU = "a run on the CPU"  # the source of a message that tests/teaching/failures/says_*.txt make PyTorch say


@dataclass(frozen=True)
class Row:
    """One row in the index: what you see, and the source if it's a message that the card's own run doesn't show."""

    kind: str
    text: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure. Its name begins with the symptom and is also the failure's anchor on the page.

    `broken` and `fixed` are rank functions that return named numbers; `right` computes the same numbers in one process,
    without ranks. All three are None for a failure that has a `source` and isn't run here. A broken run ends in an
    error that matches `says`, or gives wrong numbers. A fixed run's numbers are right within a relative `tolerance`.
    """

    name: str
    title: str
    why: str
    tell: str
    fix: str
    messages: Sequence[str] = ()  # pieces of what a CPU rank shows under torchrun or `launch`
    numbers: Sequence[str] = ()
    behavior: Sequence[str] = ()
    quotes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # messages that the runs don't show, by source
    source: str = ""
    broken: RankFunction | None = None
    fixed: RankFunction | None = None
    right: Callable[[], Numbers] | None = None
    says: str = ""  # a regular expression
    tolerance: float = 1e-5
    group_timeout_s: float | None = None  # of the broken run's collectives
    stall_s: float = 2.0  # a broken run whose ranks haven't moved for this long counts as hanging
    not_in: str = ""  # the last PyTorch version known not to show the symptom, such as "2.11"
    since: str = ""  # the first PyTorch version that has the fix, such as "2.13"

    def __post_init__(self) -> None:
        if self.symptom not in SYMPTOMS:
            raise ValueError(f"{self.name!r} has to begin with one of the symptoms {', '.join(SYMPTOMS)}")

    @property
    def symptom(self) -> str:
        return self.name.partition("-")[0]

    @property
    def is_run(self) -> bool:
        return self.broken is not None

    def rows(self) -> Iterator[Row]:
        """Yield the failure's index rows: first the symptoms seen in its runs, then the quoted messages."""
        for kind, texts in ((MESSAGE, self.messages), (NUMBER, self.numbers), (BEHAVIOR, self.behavior)):
            yield from (Row(kind, text) for text in texts)
        for source, texts in self.quotes.items():
            yield from (Row(MESSAGE, text, source) for text in texts)


def link_to(name: str) -> str:
    """Return a Markdown link to a failure's card in notebook 11, for use in other notebooks in the same folder."""
    return f"[{name}]({CHAPTER}#{name})"


def same_numbers(found: Numbers, right: Numbers, tolerance: float) -> bool:
    """Return whether the names are the same and the numbers agree within `tolerance`; NaN differs from everything."""
    return found.keys() == right.keys() and all(
        math.isclose(found[name], right[name], rel_tol=tolerance, abs_tol=tolerance) for name in right
    )
