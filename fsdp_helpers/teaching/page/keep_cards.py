"""Write the failure cards into notebook 11: their text, the index and, for failures that we run, the saved runs.

python -m fsdp_helpers.teaching.page.keep_cards               update the text and the index, but keep the saved runs
python -m fsdp_helpers.teaching.page.keep_cards NAME ...      run these again and save what they show
python -m fsdp_helpers.teaching.page.keep_cards --run         run all of them again (takes half an hour)
python -m fsdp_helpers.teaching.page.keep_cards --tools       run py-spy and the debug server, which need extra packages
"""

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.failures import gallery, plain, tools
from fsdp_helpers.teaching.failures.entry import CHAPTER, Failure
from fsdp_helpers.teaching.page import cards

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / CHAPTER
MOST_S = 60.0  # until a broken run shows its symptom, even on a busy machine; on an idle one, it takes seconds
SEEN, WHY, PROOF, UNDER_TORCHRUN = "**What you see**\n\n", "\n\n**Why.**", "**The proof**\n\n", "Under plain torchrun"


def main(arguments: Sequence[str], path: Path = NOTEBOOK) -> None:
    """Update the cards in the notebook; save the notebook after each failure that is run, and at the end."""
    names = {gallery.find(name).name for name in arguments if not name.startswith("--")}
    again = {failure.name for failure in gallery.RUN} if "--run" in arguments else names
    notebook = nbformat.read(path, as_version=4)
    for failure in gallery.GALLERY.values():
        cell = cell_of(notebook, failure)
        runs = failure.is_run and (failure.name in again or not cell.source)
        cell.source = written(failure, cell.source, runs, is_live(notebook, failure))
        if runs:
            nbformat.write(notebook, path)
            print(failure.name, flush=True)
    if "--tools" in arguments:
        keep_tools(notebook)
    (index,) = [cell for cell in notebook.cells if cell.id == "index"]
    index.outputs[0].data["text/markdown"] = cards.index().data
    nbformat.write(notebook, path)


def cell_of(notebook: NotebookNode, failure: Failure) -> NotebookNode:
    """Return the cell of a failure's card; if there is none, add one at the end of its symptom's section."""
    found = [cell for cell in notebook.cells if cell.id == failure.name]
    if found:
        return found[0]
    ids = [cell.id for cell in notebook.cells]
    after = ids.index(f"section-{failure.symptom}") + 1
    end = next(at for at, cell in enumerate(notebook.cells) if at >= after and cell.source.startswith("## "))
    notebook.cells.insert(end, nbformat.v4.new_markdown_cell(id=failure.name))
    return notebook.cells[end]


def is_live(notebook: NotebookNode, failure: Failure) -> bool:
    """Return whether the notebook runs this failure's card."""
    return any(f'cards.card("{failure.name}")' in cell.source for cell in notebook.cells if cell.cell_type == "code")


def written(failure: Failure, before: str, runs: bool, live: bool) -> str:
    """Return a card's Markdown, with a new run or with the saved run from its cell."""
    if not failure.is_run:
        return cards.documented_card(failure)
    if live:
        return cards.live_card(failure, plain_output(failure) if runs else saved_output(before))
    return cards.saved_card(failure, *(new_run(failure) if runs else saved_run(before)))


def saved_output(card: str) -> str:
    """Return torchrun's saved output and its introduction, from the cell above a card that the notebook runs."""
    return "".join(card.partition(UNDER_TORCHRUN)[1:])


def saved_run(card: str) -> tuple[str, str]:
    """Return the outcome and the proof of a saved run from its card's cell."""
    return card.partition(SEEN)[2].partition(WHY)[0], card.partition(PROOF)[2]


def new_run(failure: Failure) -> tuple[str, str]:
    """Run a failure and its fix; return the outcome and the proof. Raise ValueError if a run doesn't match its card."""
    start_s = time.monotonic()
    broken, seconds = gallery.run_broken(failure), time.monotonic() - start_s
    fixed = gallery.run_fixed(failure)
    if not gallery.comes_out_as_said(failure, broken) or not gallery.is_fixed(failure, fixed):
        raise ValueError(f"{failure.name}: its runs don't match its card: {broken}, {fixed}")
    if seconds > MOST_S:
        raise ValueError(f"{failure.name}: it took {seconds:.0f} s to show its symptom, more than {MOST_S:.0f} s")
    seen = "\n\n".join(filter(None, [cards.text_block(cards.as_text(broken)), plain_output(failure)]))
    return seen, cards.proof(fixed, failure.right())


def plain_output(failure: Failure) -> str:
    """If a failure ends in an error, run it under torchrun and return its output; otherwise, return ""."""
    is_error = failure.says or failure.name in plain.SCRIPTS
    return cards.plain_text(plain.run_plainly(failure.name)) if is_error else ""


def keep_tools(notebook: NotebookNode) -> None:
    """Run the tools that need extra packages, and replace their outputs in the notebook."""
    two_ranks = {"world_size": 2, "device": "cpu", "progress": False, "timeout_s": gallery.LIMIT_S}
    dump = launch(tools.dump_with_py_spy, **two_ranks)[1]
    stacks = cards.stacks_of_page(launch(tools.read_debug_server, **two_ranks)[1])
    lines = dump[dump.index("Thread ") :].splitlines()[:4]  # down to the rank function
    shown = {"py-spy": lines, "debug-server": [f"{rank}: {stack}" for rank, stack in stacks.items()]}
    for cell in notebook.cells:
        if cell.id in shown:
            block = cards.text_block("\n".join(shown[cell.id]))
            cell.source = re.sub(r"```text\n.*?\n```", lambda _, block=block: block, cell.source, flags=re.DOTALL)


if __name__ == "__main__":
    main(sys.argv[1:])
