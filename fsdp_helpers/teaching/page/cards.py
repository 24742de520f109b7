"""A card in the failure gallery: the broken code, its symptom, why, how to tell, the fix, and the proof."""

import json
import re
from pathlib import Path

from IPython.display import Markdown, display

from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.gallery import Seen
from fsdp_helpers.teaching.failures.sights import BEHAVIOR, MESSAGE, NUMBER, SIGHTS
from fsdp_helpers.teaching.page import show

KINDS = {MESSAGE: "By message", BEHAVIOR: "By behavior", NUMBER: "By number"}
MOST_OF_ERROR = 600  # characters
KEPT = Path("reference/failures.json")  # next to the notebooks


def index() -> Markdown:
    """Return the tables of symptoms, by message, number and behavior, each row with a link to its card."""
    return Markdown("\n\n".join(f"**{words}**\n\n{index_by(kind)}" for kind, words in KINDS.items()))


def index_by(kind: str) -> str:
    """Return the table for one kind of symptom, in alphabetical order."""
    rows = sorted((sight.text, name) for name, sights in SIGHTS.items() for sight in sights if sight.kind == kind)
    shown = [(as_code(text) if kind == MESSAGE else text, name) for text, name in rows]
    return "\n".join(
        ["| what you see | its card |", "| :-- | :-- |", *(f"| {text} | [{name}](#{name}) |" for text, name in shown)]
    )


def as_code(text: str) -> str:
    """Return a code span that shows all of the text, including its backticks."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def card(name: str) -> bool:
    """Run a failure and its fix, and show the card; return whether both behaved as the card says."""
    failure = gallery.find(name)
    broken, fixed = gallery.run_broken(failure), gallery.run_fixed(failure)
    draw(failure, broken, fixed)
    return gallery.comes_out_as_said(failure, broken) and gallery.is_fixed(failure, fixed)


def kept_card(name: str) -> None:
    """Show a card from the saved run of its test."""
    failure = gallery.find(name)
    record = json.loads(KEPT.read_text())[name]
    display(Markdown("*From a saved run of this failure's test, not run in this notebook.*"))
    draw(failure, seen_from(record["broken"]), seen_from(record["fixed"]))


def seen_from(record: dict) -> Seen:
    """Return a saved run's outcome as a `Seen`."""
    return Seen(**record | {"numbers": tuple(record["numbers"])})


def draw(failure: Failure, broken: Seen, fixed: Seen) -> None:
    """Show a card: its code, and the five parts of its text."""
    display(show.source(failure.broken))
    display(Markdown(f"{what_you_see(failure, broken)}\n\n{reasons(failure)}\n\n**The fix.** {failure.fix}"))
    display(show.difference(failure.broken, failure.fixed))
    display(Markdown(f"**The proof**\n\n{proof(fixed, failure.right())}"))


def what_you_see(failure: Failure, broken: Seen) -> str:
    """Return a broken run's output here and, if it ends in an error, its output under torchrun, from a saved run."""
    here = f"**What you see**\n\n```text\n{as_text(broken)}\n```"
    saved = plain_runs().get(failure.name)
    return f"{here}\n\nUnder plain torchrun (a saved run):\n\n```text\n{plain_text(saved)}\n```" if saved else here


def plain_runs() -> dict[str, dict]:
    """Return the saved runs under plain torchrun, by name."""
    return json.loads(KEPT.read_text()).get("torchrun", {})


def plain_text(saved: dict) -> str:
    """Format a saved run under torchrun: the errors, and the lines of the report that differ between failures."""
    codes = [line.strip() for line in saved["report"] if "exitcode" in line]
    return "\n".join([*saved["errors"], *saved["report"][:1], *dict.fromkeys(codes), f"exit status {saved['status']}"])


def reasons(failure: Failure) -> str:
    """Return the two explanatory parts: why, and how to tell."""
    return f"**Why.** {failure.why}\n\n**How to tell.** {failure.tell}"


def as_text(seen: Seen) -> str:
    """Return a run's outcome: its error, shortened, or the numbers of each rank."""
    if seen.error:
        error = "\n".join(filter(None, [seen.error, seen.last_words]))
        return error if len(error) <= MOST_OF_ERROR else f"{error[:MOST_OF_ERROR]} ..."
    return "\n".join(f"rank {rank}: {in_words(numbers)}" for rank, numbers in enumerate(seen.numbers))


def in_words(numbers: Numbers) -> str:
    """Return named numbers as text, to six digits."""
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())


def proof(fixed: Seen, right: Numbers) -> str:
    """Return the table that compares the fixed run with the right numbers."""
    if not fixed.numbers:
        return f"```text\n{as_text(fixed)}\n```"
    lines = ["| | " + " | ".join(right) + " |", "| :-- |" + " --: |" * len(right)]
    rows = [(f"fixed, rank {rank}", numbers) for rank, numbers in enumerate(fixed.numbers)] + [("right", right)]
    lines += [f"| {what} | " + " | ".join(f"{numbers[name]:.6g}" for name in right) + " |" for what, numbers in rows]
    return "\n".join(lines)


def documented(failure: Failure) -> str:
    """Return the Markdown of a card that isn't run here: its text, and the source it's from."""
    origin = f"**{failure.title}.** *From the documentation, not run here.*"
    return f"### {failure.name}\n\n{origin}\n\n{reasons(failure)}\n\n**The fix.** {failure.fix}\n\n**Source.** {failure.source}."


def stacks_of_page(page: str) -> dict[str, str]:
    """Return each rank's innermost frames, as the debug server's page of stacks shows them."""
    stacks = re.findall(r"<h2>Rank (\d+):.*?<pre>(.*?)</pre>", page, re.DOTALL)
    return {f"rank {rank}": shorten_stack(stack) for rank, stack in stacks}


def shorten_stack(text: str) -> str:
    """Return the innermost three frames of a rank's main thread in the last complete stack of `text`, without folders.

    Only the main thread's stack goes down to `run_rank`. The last stack may be incomplete, if the rank was killed
    while writing it.
    """
    stacks = text.split("(most recent call first)")
    main_thread = [stack for stack in stacks if "in run_rank\n" in stack]
    if not main_thread:
        raise ValueError(f"no complete stack of a rank's main thread in these {len(text)} characters: {text[-300:]!r}")
    frames = re.findall(r'File ".*?([^/\\]+)", line (\d+) in (\w+)', main_thread[-1])
    places = [f"{function} ({file}, line {line})" for file, line, function in frames if function != "wrapper"]
    return ", called from ".join(places[:3])


def sentences(message: str) -> str:
    """Return DETAIL's message as one line per rank, with its fingerprints reduced to the fields that ranks compare."""
    return (
        re.sub(r", TensorDtypes.*?\(nullopt\)\)\)", ")", message).replace(", but", ",\nbut").replace(".Coll", ".\nColl")
    )
