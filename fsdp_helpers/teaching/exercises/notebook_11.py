"""The exercise for notebook 11: diagnose runs with unnamed faults from the gallery."""

import inspect
import random
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase

from IPython.display import Markdown

from fsdp_helpers.teaching.exercises.answers import exercise, expect, expect_answered
from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.entry import SYMPTOMS, Failure
from fsdp_helpers.teaching.failures.gallery import RUN, Seen
from fsdp_helpers.teaching.page import cards

NUM_CASES = 5
UNNAMED = "broken_run"
NUM_FIXES = 8  # the right ones for the cases, and some that fix none of them

Answer = tuple[str, str, str]  # symptom, cause, and the letter of the fix


@dataclass(frozen=True)
class Case:
    """A run with an unnamed fault."""

    fault: Failure
    seen: Seen

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
    """Return a case as the reader sees it: the code, the run's output and, if the run finished, the right numbers."""
    text = without_name(cards.as_text(case.seen), case.fault)
    if case.seen.numbers:
        text += f"\nright: {cards.in_words(case.fault.right())}"
    return f"**Case {number}**\n\n```python\n{code_of(case.fault)}\n```\n\n```text\n{text}\n```"


def code_of(fault: Failure) -> str:
    """Return the code of a broken run, without the name that would give the fault away."""
    return without_name(inspect.getsource(fault.broken), fault).rstrip()


def without_name(text: str, fault: Failure) -> str:
    return text.replace(fault.broken.__name__, UNNAMED)


def draw(seed: int | None = None, num_cases: int = NUM_CASES) -> Draw:
    """Draw faults from the gallery and run them; without a seed, each call draws different faults."""
    dice = random.Random(seed)
    faults = dice.sample(RUN, num_cases)
    others = [failure.fix for failure in RUN if failure not in faults]
    fixes = [fault.fix for fault in faults] + dice.sample(others, max(0, NUM_FIXES - num_cases))
    dice.shuffle(fixes)
    cases = tuple(Case(fault, gallery.run_broken(fault)) for fault in faults)
    return Draw(cases, dict(zip(ascii_lowercase, fixes, strict=False)))


def causes() -> Markdown:
    """Return lists of the symptoms and causes that an answer can name."""
    symptoms = ", ".join(f"`{symptom}` ({words})" for symptom, words in SYMPTOMS.items())
    names = ", ".join(f"`{name}`" for name in sorted({cause_of(failure) for failure in RUN}))
    return Markdown(f"**Symptoms:** {symptoms}\n\n**Causes:** {names}")


def cause_of(failure: Failure) -> str:
    return failure.name.partition("-")[2]


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
    expect(symptom == case.fault.symptom, f"case {number}: that isn't this case's symptom; read the output again")
    known = [cause_of(failure) for failure in RUN]
    expect(cause in known, f"case {number}: {cause!r} isn't one of the causes in the list")
    wrong_cause = f"case {number}: `{cause}` looks different; compare *How to tell* on the cards for this symptom"
    expect(cause == cause_of(case.fault), wrong_cause)
    expect(letter in fixes, f"case {number}: {letter!r} isn't one of the letters {', '.join(fixes)}")
    expect(fixes[letter] == case.fault.fix, f"case {number}: the cause is right, but fix {letter} doesn't address it")
