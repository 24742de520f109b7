"""A reader's module on ranks: run with a time limit, with failures in one line and losses compared."""

import re
from collections.abc import Callable
from textwrap import shorten

from fsdp_helpers.progress import ProgressBar, count_ranks
from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch
from fsdp_helpers.teaching.exercises.answers import NotYet, expect
from fsdp_helpers.teaching.exercises.own_module import last_line_in

RANKS = (2, 3)
STALL_S, TIMEOUT_S = 15.0, 120.0  # for ranks that wait for one another, and for ranks that compute forever
LONGEST = 200  # characters of an error's message; some print a whole model
TOLERANCE = 1e-4  # fp32 sums in a different order differ by less
IN_OUR_WORDS = {  # by torch's, which do not say what to do
    "Invariant encountered: value was None": "a part of a unit was made a unit after it; inner ones first, the root"
    " last",
    "KeyError: Parameter containing": "KeyError: the optimizer has parameters that the model no longer has, since"
    " `fully_shard` has replaced them; build it afterward",
}
ABORTED = "SIGABRT"  # what gloo does to a rank that receives a different collective's bytes
HANGS = ("hang-order", "hang-gather-on-rank-0")
CARDS = {  # of 11, by what an error says; a regular expression
    ABORTED: "crash-skipped-step",
    "got mixed torch.Tensor and DTensor": "crash-mixed-tensor-dtensor",
    "KeyError: Parameter containing": "wrong-optimizer-first",
    "already managed by another FSDP group": "crash-tied-weights",
    r"Missing key.*\bmodule\.": "save-module-prefix",
    "PytorchStreamReader": "save-half-written",
    "did not answer any more|Connection (closed|reset) by peer": "crash-connection-closed",
}


def run_on_ranks(worker: Callable, module: str, world_size: int, *arguments: object) -> list:
    """Run `worker` on ranks and return the results; raise NotYet, in one line, if the reader's code fails or hangs."""
    try:
        return launch_readers(worker, module, world_size, *arguments)
    except RankError as error:
        where = last_line_in(module, error.details)
        ours = (words for torchs, words in IN_OUR_WORDS.items() if torchs in error.summary)
        summary = next(ours, shorten(error.summary, LONGEST))
        if ABORTED in summary:
            summary += "; the ranks' collectives do not match: is there a forward or a gather that some skip?"
        raise NotYet(f"on {world_size} ranks, {module}.py fails{where}: {summary}", *cards_of(error.summary)) from None


def launch_readers(worker: Callable, module: str, world_size: int, *arguments: object) -> list:
    """Run `worker` as `run_on_ranks` does, but let a RankError through."""
    bar = ProgressBar()
    bar.start(f"{module}.py, {count_ranks(world_size)} on cpu")
    settings = {"device": "cpu", "stall_s": STALL_S, "timeout_s": TIMEOUT_S, "progress": bar}
    try:
        return launch(worker, module, *arguments, world_size=world_size, **settings)
    except RankTimeout as error:
        raise NotYet(
            f"on {world_size} ranks, {module}.py doesn't end: {'; '.join(error.places)}. A collective waits until"
            " every rank takes part in it",
            *HANGS,
        ) from None


def cards_of(summary: str) -> list[str]:
    """Return the cards of 11 that treat an error of a rank."""
    return [card for says, card in CARDS.items() if re.search(says, summary, re.DOTALL)]


def expect_same_losses(losses: list[float], right: list[float], message: str, *cards: str) -> None:
    differences = [abs(loss - expected) for loss, expected in zip(losses, right, strict=True)]
    same = all(difference < TOLERANCE for difference in differences)
    first = next((step for step, difference in enumerate(differences) if not difference < TOLERANCE), 0)
    expect(same, f"{message}: {losses[first]:.5f} instead of {right[first]:.5f} in step {first + 1}", *cards)


def first_of(names: list[str]) -> str:
    return names[0] if names else ""


def in_words(ranks: tuple[int, ...]) -> str:
    return " and ".join(map(str, ranks))
