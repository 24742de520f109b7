"""The exercise for notebook 11: diagnose scripts of the field guide whose faults aren't named."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase

from IPython.display import Markdown

from fsdp_helpers.field_guide import BROKEN, SYMPTOMS, Card, cards
from fsdp_helpers.teaching.exercises.answers import exercise, expect, expect_answered
from fsdp_helpers.teaching.run_failure import Outcome, run

SHOWN = (  # in the chapter itself
    *("hang-uneven-batches", "hang-local-decision", "hang-order", "wrong-forgotten-root", "wrong-summed-loss"),
    *("wrong-sampler-padding", "wrong-metric-order", "crash-skipped-step", "memory-root-only", "slow-many-units"),
    *("crash-connection-closed", "crash-mixed-tensor-dtensor"),
)
NUM_CASES = 5
NUM_FIXES = 8  # the right ones for the cases, and some that fix none of them

Answer = tuple[str, str, str]  # symptom, cause, and the letter of the fix


@dataclass(frozen=True)
class Case:
    """A run of a broken script whose fault isn't named."""

    card: Card
    outcome: Outcome

    def __repr__(self) -> str:
        return "a case"  # finding its fault is up to the reader


@dataclass(frozen=True)
class Draw:
    """The cases in one draw and the lettered fixes to choose from."""

    cases: tuple[Case, ...]
    fixes: dict[str, str]

    def __repr__(self) -> str:
        return f"{len(self.cases)} cases"

    def _repr_markdown_(self) -> str:
        runs = [as_markdown(number, case) for number, case in enumerate(self.cases, start=1)]
        fixes = "\n".join(f"- **{letter}** {fix}" for letter, fix in self.fixes.items())
        return "\n\n".join([*runs, f"**Fixes**\n\n{fixes}"])


def as_markdown(number: int, case: Case) -> str:
    """Return a case as the reader sees it: the script without its marks, and what its ranks said."""
    said = re.sub(r"  # broken[^`\n]*", "", "\n".join([*case.outcome.errors, case.outcome.printed]).strip())
    said = re.sub(r"(?<![\w.])/(?:[^\s/\"']+/)+", "", said)  # this machine's folders
    return f"**Case {number}**\n\n```python\n{code_of(case.card)}\n```\n\n```text\n{said}\n```"


def code_of(card: Card) -> str:
    """Return a broken script without what would give its fault away: its card, and the marks of broken lines."""
    lines = [line for line in card.script(broken=True).splitlines() if "# fixed: " not in line]
    return "\n".join(BROKEN.sub("", line) for line in lines).strip()


def unseen_cards() -> list[Card]:
    """Return the cards that have a script, and that the chapter doesn't show."""
    return [card for card in cards().values() if card.code and card.name not in SHOWN]


def draw(seed: int | None = None, num_cases: int = NUM_CASES) -> Draw:
    """Draw scripts and run them on two CPU ranks; without a seed, each call draws different ones."""
    dice = random.Random(seed)
    drawn = dice.sample(unseen_cards(), num_cases)
    others = [card for card in unseen_cards() if card not in drawn]
    chosen = drawn + dice.sample(others, max(0, NUM_FIXES - num_cases))
    fixes = [card.part("The fix") for card in chosen]
    dice.shuffle(fixes)
    cases = tuple(Case(card, run("script", card.script(broken=True))) for card in drawn)
    return Draw(cases, dict(zip(ascii_lowercase, fixes, strict=False)))


def causes() -> Markdown:
    """Return lists of the symptoms and causes that an answer can name."""
    symptoms = ", ".join(f"`{symptom}` ({words})" for symptom, words in SYMPTOMS.items())
    names = ", ".join(f"`{name}`" for name in sorted({cause_of(card) for card in unseen_cards()}))
    return Markdown(f"**Symptoms:** {symptoms}\n\n**Causes:** {names}")


def symptom_of(card: Card) -> str:
    return card.name.partition("-")[0]


def cause_of(card: Card) -> str:
    return card.name.partition("-")[2]


@exercise("11")
def check_diagnosis(cases: Draw, answers: Mapping[int, Answer]) -> str:
    """Notebook 11: check the symptom, cause and fix in each answer against its case."""
    for number, case in enumerate(cases.cases, start=1):
        answer = answers.get(number)
        expect_answered(answer)
        expect(
            isinstance(answer, tuple) and len(answer) == 3,
            f"case {number}: answer with a tuple of the symptom, the cause and the letter of the fix",
        )
        check_case(number, case, answer, cases.fixes)
    return f"All {len(cases.cases)} faults found, each with its fix. Draw again for different faults."


def check_case(number: int, case: Case, answer: Answer, fixes: Mapping[str, str]) -> None:
    """Raise NotYet for the first wrong symptom, cause or fix, without revealing the right one."""
    symptom, cause, letter = answer
    expect(symptom in SYMPTOMS, f"case {number}: {symptom!r} isn't one of the symptoms {', '.join(SYMPTOMS)}")
    expect(symptom == symptom_of(case.card), f"case {number}: that isn't this case's symptom; read the output again")
    known = [cause_of(card) for card in unseen_cards()]
    expect(cause in known, f"case {number}: {cause!r} isn't one of the causes in the list")
    wrong_cause = f"case {number}: `{cause}` looks different; compare *How to tell* in the files for this symptom"
    expect(cause == cause_of(case.card), wrong_cause)
    expect(letter in fixes, f"case {number}: {letter!r} isn't one of the letters {', '.join(fixes)}")
    right = fixes[letter] == case.card.part("The fix")
    expect(right, f"case {number}: the cause is right, but fix {letter} doesn't address it")
