"""Check a reader's module on ranks with a time limit, and report failures in one line."""

import ast
import importlib
import importlib.util
import logging
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from textwrap import shorten
from typing import Any

from fsdp_helpers.measuring.collectives import Collective
from fsdp_helpers.progress import ProgressBar
from fsdp_helpers.quantities import format_count
from fsdp_helpers.ranks.launch import RankError, RankTimeout, launch
from fsdp_helpers.teaching.exercises.answers import NotYet, error_line, expect

PACKAGE = __name__.partition(".")[0]


def read_module(module: str, name: str, *, with_package: bool = False) -> Any:
    """Run the module's file and return its object `name`; raise NotYet if the file is missing, fails or lacks `name`.

    Unless `with_package` is set, also refuse a module that imports this package, which contains many of the answers.
    """
    expect(isinstance(module, str), f"the answer is {module!r}; it should be the name of your module, as a string")
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    found = importlib.util.find_spec(module)
    expect(found is not None, f"there is no {module}.py here; run the cell that writes it")
    try:
        names = runpy.run_path(found.origin, run_name=module)  # from source, never from cached bytecode
    except Exception as error:
        raise NotYet(f"{module}.py can't be imported: {error_line(error)}") from None
    expect(name in names, f"{module}.py doesn't define {name}")
    is_own = with_package or PACKAGE not in _imported(Path(found.origin).read_text())
    expect(is_own, f"{module}.py imports {PACKAGE}; write the code yourself, with only torch")
    return names[name]


def _imported(source: str) -> set[str]:
    """Return the top-level packages that a module's source imports, even inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def import_from_reader(module: str, name: str) -> Any:
    """Import the reader's module on this rank, and return the object called `name`."""
    return getattr(importlib.import_module(module), name)


def last_line_in(module: str, details: str) -> str:
    """Return where the traceback last enters the reader's file, such as " on line 12", or "" if it never does."""
    lines = re.findall(rf'{re.escape(module)}\.py", line (\d+)', details)
    return f" on line {lines[-1]}" if lines else ""


RANKS = (2, 3)
STALL_S, TIMEOUT_S = 15.0, 120.0  # limits for ranks that wait for one another, and for ranks that compute forever
LONGEST = 200  # characters of an error message to show; some messages print a full model
TOLERANCE = 1e-4  # fp32 sums in a different order differ by less
IN_OUR_WORDS = {  # keyed by torch's message, which doesn't say what to do
    "Invariant encountered: value was None": "a module became a unit after the module that contains it; shard inner "
    "modules first and the root last",
    "KeyError: Parameter containing": "KeyError: the optimizer has parameters that the model no longer has, since"
    " `fully_shard` replaced them; build the optimizer after `fully_shard`",
}
ABORTED = "SIGABRT"  # how gloo ends a rank that receives a different collective's bytes
MISMATCH = (  # what to say of it, and the failure that shows the same
    "does every rank run the same ones, in the same order, on tensors of one size? A sharded forward pass has some, too",
    "crash-skipped-step",
)
HANGS = ("hang-order", "hang-gather-on-rank-0")
FAILURES = {  # of the field guide, keyed by a regular expression that matches the error
    "got mixed torch.Tensor and DTensor": "crash-mixed-tensor-dtensor",
    "KeyError: Parameter containing": "wrong-optimizer-first",
    "already managed by another FSDP group": "crash-tied-weights",
    r"Missing key.*\bmodule\.": "save-module-prefix",
    "PytorchStreamReader|metadata is None": "save-half-written",
    "Missing key in checkpoint": "save-missing-key",
    "stopped answering|Connection (closed|reset) by peer": "crash-connection-closed",
}


Findings = Generator[tuple, None, str]  # yields (wrong, message, *failures), and returns praise
ON_A_RANK = "on {world_size} ranks, rank {rank}: "


def judge_on_ranks(
    check: Callable[..., Findings],
    module: str,
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    *arguments: object,
    source: str = ON_A_RANK,
) -> str:
    """Run `check` on each number of ranks; return the last rank's praise, or raise NotYet for what's wrong.

    `check(rank, world_size, *objects, *arguments)` gets the objects called `names` from the reader's module. It yields
    a tuple (wrong, message, *failures) for each thing to check, and returns praise, in which "{ranks}" stands for their
    numbers. A rank stops at the first tuple that's wrong; the others may not, so no collective may follow. The message
    of the first such rank is shown, after `source`.
    """
    for name in names:
        read_module(module, name)
    for world_size in ranks:
        found = run_on_ranks(first_wrong, module, world_size, check, names, arguments)
        for rank, (wrong, text, *failures) in enumerate(found):
            expect(not wrong, source.format(world_size=world_size, rank=rank) + text, *failures)
    return text.format(ranks=in_words(ranks))


def first_wrong(
    rank: int, world_size: int, module: str, check: Callable[..., Findings], names: tuple[str, ...], arguments: tuple
) -> tuple:
    """Return the first tuple from `check` whose `wrong` is true; if there's none, return (False, praise)."""
    findings = check(rank, world_size, *(import_from_reader(module, name) for name in names), *arguments)
    while True:
        try:
            found = next(findings)
        except StopIteration as done:
            return False, done.value
        if found[0]:
            return found


def run_on_ranks(
    worker: Callable, module: str, world_size: int, *arguments: object, mismatch: tuple[str, str] = MISMATCH
) -> list:
    """Run `worker` on ranks and return the results; raise a one-line NotYet if the reader's code fails or hangs.

    `mismatch` is the question to ask, and the failure to show, if the ranks' collectives don't match.
    """
    try:
        return launch_readers(worker, module, world_size, *arguments)
    except RankError as error:
        where = last_line_in(module, error.details)
        ours = (words for torchs, words in IN_OUR_WORDS.items() if torchs in error.summary)
        summary, failures = next(ours, shorten(cause_of(error.summary), LONGEST)), failures_of(error.summary)
        if ABORTED in summary:
            question, failure = mismatch
            summary, failures = f"{summary}; the ranks' collectives don't match: {question}", [failure, *failures]
        raise NotYet(f"on {format_count(world_size, 'rank')}, {module}.py fails{where}: {summary}", *failures) from None


def launch_readers(worker: Callable, module: str, world_size: int, *arguments: object) -> list:
    """Run `worker` as `run_on_ranks` does, but don't catch a RankError."""
    bar = ProgressBar()
    bar.start(f"{module}.py, {format_count(world_size, 'rank')} on cpu")
    settings = {"device": "cpu", "stall_s": STALL_S, "timeout_s": TIMEOUT_S, "progress": bar}
    try:
        return launch(run_quietly, worker, module, *arguments, world_size=world_size, **settings)
    except RankTimeout as error:
        raise NotYet(
            f"on {world_size} ranks, {module}.py doesn't finish: {'; '.join(error.places)}. A collective waits until"
            " every rank takes part",
            *HANGS,
        ) from None


def run_quietly(rank: int, world_size: int, worker: Callable, *arguments: object) -> Any:
    """Run `worker` without torch's warnings and logs: what's wrong is in the verdict, which they would scroll away."""
    warnings.simplefilter("ignore")
    logging.disable()
    return worker(rank, world_size, *arguments)


def cause_of(summary: str) -> str:
    """Return a DCP error's last line, the cause on the first rank, in place of the traceback in its message."""
    return summary.splitlines()[-1] if "CheckpointException" in summary else summary


def failures_of(summary: str) -> list[str]:
    """Return the names of the failures that explain a rank's error."""
    return [name for says, name in FAILURES.items() if re.search(says, summary, re.DOTALL)]


def losses_differ(losses: list[float], right: list[float], message: str, *failures: str) -> tuple:
    """Return the tuple to yield for losses that should be `right`."""
    pairs = enumerate(zip(losses, right, strict=True), start=1)
    wrong = ((step, loss, expected) for step, (loss, expected) in pairs if not abs(loss - expected) < TOLERANCE)
    step, loss, expected = next(wrong, (0, 0.0, 0.0))
    return step > 0, f"{message}: {loss:.5f} instead of {expected:.5f} in step {step}", *failures


def norm_differs(norm: float, right: float, world_size: int, num_parts: int = 1) -> tuple:
    """Return the tuple to yield for the norm of the full gradient in a step of `num_parts`, which should be `right`."""
    ratio = norm / right
    off = f"the gradient norm is {ratio:.2f} times the norm in a single process"
    for number, what in ((world_size, "ranks"), (num_parts, "parts")):
        if number > 1 and abs(ratio / number - 1) < TOLERANCE:
            off += f"; a sum over {number} {what} becomes their mean only when it's divided by {number}"
    too_small = abs(ratio * world_size - 1) < TOLERANCE
    return not abs(ratio - 1) < TOLERANCE, off, *(["wrong-summed-loss"] if too_small else [])


def reduced_early(collectives: list[Collective]) -> tuple:
    """Return the tuple to yield for a step's collectives, in which no all-gather should follow the last reduction."""
    ops = [event.op for event in collectives if event.op in ("all_gather", "reduce_scatter")]
    early = "the gradients are reduced before the last backward pass; what later parts add never is"
    return ops[-1:] == ["all_gather"], early


def units_differ(units: list[str], right: list[str]) -> tuple:
    """Return the tuple to yield for the names of a model's units, which should be `right`: each block and the root."""
    cut = f"the units are {', '.join(units)}; make one unit per block, plus the root"
    return units != right, cut, *(["memory-root-only"] if units == ["root"] else [])


def first_of(names: list[str]) -> str:
    return names[0] if names else ""


def in_words(ranks: tuple[int, ...]) -> str:
    return " and ".join(map(str, ranks))
