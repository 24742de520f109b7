"""Every link to a failure leads to its file, and every failure that a checker names is there."""

import re

import IPython.display
import pytest
from chapters import headings
from leftovers import PROJECT

from fsdp_helpers.field_guide import SYMPTOMS, cards
from fsdp_helpers.teaching.exercises import notebook_03, notebook_04, on_ranks
from fsdp_helpers.teaching.exercises.answers import NotYet, exercise, expect

NOTEBOOKS = PROJECT / "notebooks"
PAGES = [*PROJECT.glob("*.md"), *NOTEBOOKS.glob("*.md"), *NOTEBOOKS.glob("*.ipynb"), *NOTEBOOKS.glob("take_home/*.py")]
TO_FAILURES = re.compile(r"""(?:\]\(|href=\\?"|\s)((?:notebooks/|\.\./)?failures/[\w-]+\.\w+)""")
TO_11 = re.compile(r"\]\(11_when_it_breaks\.ipynb#((?:[^()\s]|\([^()]*\))+)\)")
EXERCISES = sorted((PROJECT / "fsdp_helpers/teaching/exercises").glob("*.py"))
NAME = re.compile(rf'"((?:{"|".join(SYMPTOMS)})-[a-z0-9-]+)"')
NAMED = {path.stem: set(NAME.findall(path.read_text())) for path in EXERCISES}


@pytest.mark.parametrize("page", [pytest.param(path, id=path.name) for path in PAGES if path.name != "CHANGELOG.md"])
def test_links_to_failures_and_to_11_lead_somewhere(page):
    text = page.read_text("utf-8")
    assert [path for path in TO_FAILURES.findall(text) if not (page.parent / path).exists()] == []
    assert set(TO_11.findall(text)) <= headings(NOTEBOOKS / "11_when_it_breaks.ipynb")


def test_every_failure_that_a_checker_names_is_there():
    assert set().union(*NAMED.values()) <= cards().keys()


ERRORS = {
    "Missing key in checkpoint state_dict: model.weight.": ["save-missing-key"],
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
def test_an_error_of_a_rank_has_its_failure(says):
    assert on_ranks.failures_of(says) == ERRORS[says]


def test_a_peak_that_is_too_high_has_its_failure():
    """Whose fix is what the exercise asks for; in 03 more ranks are what helps."""
    named = notebook_03.LOWER_PEAK.peak_failure, notebook_04.THRESHOLD.peak_failure
    assert named == (None, "memory-default-threshold")


def test_a_notebook_links_them_above_the_message(monkeypatch):
    @exercise("none")
    def check_something():
        expect(False, "the losses don't match DDP's", "wrong-summed-loss", "hang-order")

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda part: shown.append(part.data))
    with pytest.raises(NotYet) as refused:
        check_something()
    (line,), _ = [refused.value._render_traceback_() for _ in range(2)]  # IPython asks twice
    assert line.endswith("the losses don't match DDP's (failures: wrong-summed-loss, hang-order)")
    assert "[hang-order](failures/hang-order.py)" in shown[0]
    NotYet("replace the ... with your answer")._render_traceback_()
    assert len(shown) == 1, "once, and nothing to link for the second"
