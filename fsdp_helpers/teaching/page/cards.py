"""A card in the failure gallery: the broken code, its symptom, the reason, how to tell, the fix, and the proof."""

import re

from IPython.display import Markdown, display

from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.entry import BEHAVIOR, MESSAGE, NUMBER, Failure, Numbers
from fsdp_helpers.teaching.failures.gallery import Seen
from fsdp_helpers.teaching.page import show

KINDS = {MESSAGE: "By message", BEHAVIOR: "By behavior", NUMBER: "By number"}
MOST_OF_ERROR = 600  # characters
TOLD_OF_RANKS = ("exitcode", "error_file", "traceback")  # in torchrun's report


def index() -> Markdown:
    """Return three tables of symptoms (by message, by behavior and by number); each row links to its card."""
    return Markdown("\n\n".join(f"**{words}**\n\n{index_by(kind)}" for kind, words in KINDS.items()))


def index_by(kind: str) -> str:
    """Return the table for one kind of symptom, with its rows in alphabetical order."""
    rows = sorted(
        (row.text, f"[{failure.name}](#{failure.name})", row.source)
        for failure in gallery.GALLERY.values()
        for row in failure.rows()
        if row.kind == kind
    )
    if kind != MESSAGE:
        return show.table(["what you see", "its card"], [row[:2] for row in rows]).data
    shown = [(as_code(text), link, source or "the card's run") for text, link, source in rows]
    return show.table(["what you see", "its card", "from"], shown).data


def as_code(text: str) -> str:
    """Return a code span that shows all of the text, including its backticks."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def card(name: str) -> bool:
    """Run a failure and its fix, and show the card; return whether both behaved as the card describes."""
    failure = gallery.find(name)
    broken, fixed = gallery.run_broken(failure), gallery.run_fixed(failure)
    display(show.source(failure.broken))
    display(Markdown(f"**What you see**\n\n{text_block(as_text(broken))}\n\n{explanation(failure)}"))
    display(show.difference(failure.broken, failure.fixed))
    display(Markdown(f"**The proof**\n\n{proof(fixed, failure.right())}"))
    return gallery.comes_out_as_said(failure, broken) and gallery.is_fixed(failure, fixed)


def saved_card(failure: Failure, seen: str, proven: str) -> str:
    """Return the Markdown for a card with a saved run, given what the run showed and the proof of its fix."""
    code, difference = show.source(failure.broken).code, show.difference(failure.broken, failure.fixed).code
    return "\n\n".join(
        [
            f"### {failure.name}\n\n**{failure.title}.** *A saved run.*",
            f"```python\n{code.rstrip()}\n```",
            f"**What you see**\n\n{seen}",
            explanation(failure),
            f"```diff\n{difference}\n```",
            f"**The proof**\n\n{proven}",
        ]
    )


def documented_card(failure: Failure) -> str:
    """Return the Markdown for a card that isn't run here: its text and its source."""
    heading = f"### {failure.name}\n\n**{failure.title}.** *From the documentation, not run here.*"
    return f"{heading}\n\n{explanation(failure)}\n\n**Source.** {failure.source}."


def live_card(failure: Failure, plainly: str) -> str:
    """Return the Markdown above a card that the notebook runs: its heading and any saved output from plain torchrun."""
    return f"### {failure.name}\n\n**{failure.title}.**" + (f" {plainly}" if plainly else "")


def plain_text(saved: dict) -> str:
    """Format a run under torchrun: the errors, and the lines of the report that differ between failures."""
    told = [line.strip() for line in saved["report"] if line.lstrip().startswith(TOLD_OF_RANKS)]
    lines = [*saved["errors"], *saved["report"][:1], *dict.fromkeys(told), f"exit status {saved['status']}"]
    return "Under plain torchrun (a saved run):\n\n" + text_block("\n".join(lines))


def text_block(text: str) -> str:
    """Return the text as a code block."""
    return f"```text\n{text}\n```"


def explanation(failure: Failure) -> str:
    """Return a card's explanation: why, how to tell, and the fix."""
    return f"**Why.** {failure.why}\n\n**How to tell.** {failure.tell}\n\n**The fix.** {failure.fix}"


def as_text(seen: Seen) -> str:
    """Return a run's outcome as text: its shortened error, or each rank's numbers."""
    if seen.error:
        error = "\n".join(filter(None, [seen.error, seen.last_words]))
        return error if len(error) <= MOST_OF_ERROR else f"{error[:MOST_OF_ERROR]} ..."
    return "\n".join(f"rank {rank}: {in_words(numbers)}" for rank, numbers in enumerate(seen.numbers))


def in_words(numbers: Numbers) -> str:
    """Return named numbers as text, to six significant digits."""
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())


def proof(fixed: Seen, right: Numbers) -> str:
    """Return a table comparing the fixed run with the right numbers or, if the run has no numbers, its output."""
    if not fixed.numbers:
        return text_block(as_text(fixed))
    lines = ["| | " + " | ".join(right) + " |", "| :-- |" + " --: |" * len(right)]
    rows = [(f"fixed, rank {rank}", numbers) for rank, numbers in enumerate(fixed.numbers)] + [("right", right)]
    lines += [f"| {what} | " + " | ".join(f"{numbers[name]:.6g}" for name in right) + " |" for what, numbers in rows]
    return "\n".join(lines)


def stacks_of_page(page: str) -> dict[str, str]:
    """Return each rank's innermost frames, as shown on the debug server's stack page."""
    stacks = re.findall(r"<h2>Rank (\d+):.*?<pre>(.*?)</pre>", page, re.DOTALL)
    return {f"rank {rank}": shorten_stack(stack) for rank, stack in stacks}


def shorten_stack(text: str) -> str:
    """Return the three innermost frames of the main thread's last complete stack in `text`, without folders.

    Only the main thread's stack contains `run_rank`. The last stack may be incomplete if the rank was killed while
    writing it.
    """
    stacks = text.split("(most recent call first)")
    main_thread = [stack for stack in stacks if "in run_rank\n" in stack]
    if not main_thread:
        raise ValueError(f"no complete stack of a rank's main thread in these {len(text)} characters: {text[-300:]!r}")
    frames = re.findall(r'File ".*?([^/\\]+)", line (\d+) in (\w+)', main_thread[-1])
    places = [f"{function} ({file}, line {line})" for file, line, function in frames if function != "wrapper"]
    return ", called from ".join(places[:3])


def sentences(message: str) -> str:
    """Return a message from debug level DETAIL as one line per rank, with just the fields that ranks compare."""
    return (
        re.sub(r", TensorDtypes.*?\(nullopt\)\)\)", ")", message).replace(", but", ",\nbut").replace(".Coll", ".\nColl")
    )
