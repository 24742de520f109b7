"""A checker that sees a failure of the gallery names its card in 11, and a notebook links it."""

import re

import IPython.display
import nbformat
import pytest
from leftovers import PROJECT

from fsdp_helpers.teaching.exercises import notebook_03, notebook_04, on_ranks
from fsdp_helpers.teaching.exercises.answers import NotYet, exercise, expect
from fsdp_helpers.teaching.failures.entry import CHAPTER, SYMPTOMS
from fsdp_helpers.teaching.failures.gallery import GALLERY

EXERCISES = sorted((PROJECT / "fsdp_helpers/teaching/exercises").glob("*.py"))
NAME = re.compile(rf'"((?:{"|".join(SYMPTOMS)})-[a-z0-9-]+)"')
NAMED = {path.stem: set(NAME.findall(path.read_text())) for path in EXERCISES}
HEADINGS = {
    cell.source.partition("\n")[0] for cell in nbformat.read(PROJECT / "notebooks" / CHAPTER, as_version=4).cells
}


@pytest.mark.parametrize("name", sorted(set().union(*NAMED.values())))
def test_every_card_that_a_checker_names_is_in_11(name):
    assert name in GALLERY and f"### {name}" in HEADINGS


def test_every_chapter_with_failures_of_ranks_names_some():
    """Of 02 to 14, except for 05, 09 and 12, whose checkers look at numbers alone."""
    chapters = {f"notebook_{number}" for number in ("02", "03", "04", "06", "07", "08", "10", "13", "14")}
    assert {module for module, names in NAMED.items() if names} >= chapters | {"on_ranks", "runs"}


ERRORS = {
    "the process was ended by SIGABRT": ["crash-skipped-step"],
    "RuntimeError: aten.mm got mixed torch.Tensor and DTensor, need to convert": ["crash-mixed-tensor-dtensor"],
    "Parameter is shared with a parameter already managed by another FSDP group": ["crash-tied-weights"],
    'Missing key(s) in state_dict: "0.weight".\n Unexpected key(s): "module.0.weight".': ["save-module-prefix"],
    'Missing key(s) in state_dict: "head.weight".': [],
    "PytorchStreamReader failed reading zip archive": ["save-half-written"],
    "rank 1 stopped answering: gone or cut off": ["crash-connection-closed"],
    "Connection closed by peer [127.0.0.1]:1234": ["crash-connection-closed"],
    "ValueError: shapes differ": [],
}


@pytest.mark.parametrize("says", ERRORS)
def test_an_error_of_a_rank_has_its_card(says):
    assert on_ranks.cards_of(says) == ERRORS[says]


def test_a_peak_that_is_too_high_has_its_card():
    """Where 11 has the remedy that the exercise asks for; in 03 more ranks are what helps."""
    assert (notebook_03.LOWER_PEAK.peak_card, notebook_04.THRESHOLD.peak_card) == (None, "memory-default-threshold")


def test_a_notebook_links_them_above_the_message(monkeypatch):
    @exercise("none")
    def check_something():
        expect(False, "the losses don't match DDP's", "wrong-summed-loss", "hang-order")

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda part: shown.append(part.data))
    with pytest.raises(NotYet) as refused:
        check_something()
    (line,), _ = [refused.value._render_traceback_() for _ in range(2)]  # IPython asks twice
    assert line.endswith("the losses don't match DDP's (in notebook 11: wrong-summed-loss, hang-order)")
    assert "[hang-order](11_when_it_breaks.ipynb#hang-order)" in shown[0]
    NotYet("replace the ... with your answer")._render_traceback_()
    assert len(shown) == 1, "once, and nothing to link for the second"
