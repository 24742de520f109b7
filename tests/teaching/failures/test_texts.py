"""The index by what you see: every card is in it, and what it quotes is what real runs say."""

import re
from pathlib import Path

import nbformat
import pytest
import torch

from fsdp_helpers.cli.explain import normalized
from fsdp_helpers.teaching.failures import plain
from fsdp_helpers.teaching.failures.entry import BEHAVIOR, MESSAGE, NUMBER
from fsdp_helpers.teaching.failures.gallery import GALLERY, RUN
from fsdp_helpers.teaching.failures.texts import TEXT, TEXTS
from fsdp_helpers.teaching.page import keep_cards

CARDS = {cell.id: cell.source for cell in nbformat.read(keep_cards.NOTEBOOK, as_version=4).cells}
ROWS = [(failure.name, row) for failure in GALLERY.values() for row in failure.rows()]
QUOTES = [(name, row) for name, row in ROWS if row.source]
MESSAGES = [(failure.name, text) for failure in GALLERY.values() for text in failure.messages]
SITE = Path(torch.__file__).parent.parent


def one_side(text: str) -> str:
    """Which rank tells of it, whether it was sending, and how its connection ended are a matter of microseconds."""
    text = normalized(text).replace("send operation", "recv operation")
    return text.replace("connection reset by peer", "connection closed by peer")


def test_every_card_has_a_row():
    assert {name for name, _ in ROWS} == GALLERY.keys()
    assert {row.kind for _, row in ROWS} == {MESSAGE, NUMBER, BEHAVIOR}
    assert all("|" not in row.text and "\n" not in row.text for _, row in ROWS)


def test_the_text_read_without_torch_is_that_of_the_gallery():
    def text(failures):
        return {name: [getattr(failure, part) for part in TEXT] for name, failure in failures.items()}

    assert text(TEXTS) == text(GALLERY)


@pytest.mark.parametrize("name, text", MESSAGES)
def test_a_quoted_message_is_in_a_saved_run(name, text):
    """That torch still says so, test_failures asks the runs under `launch`; below, runs under torchrun."""
    assert name in {failure.name for failure in RUN}, "what a CPU can't show is a quote, with its source"
    assert any(
        one_side(text) in one_side(output) for output in re.findall(r"```text\n(.*?)```", CARDS[name], re.DOTALL)
    )


@pytest.mark.parametrize("name, row", QUOTES)
def test_what_was_not_seen_here_names_its_source(name, row):
    source = SITE / row.source
    if row.source.startswith("torch/") and source.suffix == ".py":
        assert row.text.partition(" torch.bfloat16")[0] in " ".join(source.read_text().replace('"', "").split())


FAST = ("crash-connection-closed",)
UNDER_TORCHRUN = [
    pytest.param(failure, marks=[] if failure.name in FAST else pytest.mark.long, id=failure.name)
    for failure in RUN
    if keep_cards.UNDER_TORCHRUN in CARDS[failure.name]
]


@pytest.mark.parametrize("failure", UNDER_TORCHRUN)
def test_torchrun_still_says_so(failure):
    """The messages that the saved output has."""
    saved = one_side(keep_cards.saved_output(CARDS[failure.name]).partition("\n```\n\n")[0])
    said = one_side(keep_cards.plain_output(failure))
    assert "exit code 1" in said and "exit code 1" in saved
    assert all(one_side(text) in said for text in failure.messages if one_side(text) in saved)


PRINTED = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/somebody/train.py", line 3, in <module>
[rank0]: RuntimeError: Error(s) in loading state_dict for Sequential:
[rank0]: \tMissing key(s) in state_dict: "0.weight".
[rank1]:[E1123 17:10:15.245069943 socket.cpp:1028] [c10d] The client socket has timed out (127.0.0.1, 40399).
  what():  [enforce fail at /__w/gloo/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 72 vs 18.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
  host      : somebodys-laptop
  exitcode  : -6 (pid: 8666)  (SIGABRT)
"""


def test_a_saved_run_has_what_matters_and_nothing_of_the_machine():
    assert plain.what_matters(1, PRINTED) == {
        "status": 1,
        "errors": [
            "[rank0]: RuntimeError: Error(s) in loading state_dict for Sequential:",
            '[rank0]: \tMissing key(s) in state_dict: "0.weight".',
            "[rank1]:[E socket.cpp:1028] [c10d] The client socket has timed out (ADDRESS, PORT).",
            "  what():  [enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 72 vs 18.",
        ],
        "report": [
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
            "  host      : HOST",
            "  exitcode  : -6 (pid: PID)  (SIGABRT)",
        ],
    }
