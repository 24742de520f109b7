"""Verdicts as a notebook shows them, and the small exercises of all chapters: what is folded as their solution is right."""

import re
from html import unescape
from importlib import import_module
from pkgutil import iter_modules
from textwrap import indent

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell
from leftovers import PROJECT
from traitlets.config import Config

from fsdp_helpers.teaching import exercises
from fsdp_helpers.teaching.exercises import answers, notebook_01, notebook_06
from fsdp_helpers.teaching.exercises.answers import NotYet

CHAPTERS = [import_module(f"{exercises.__name__}.{found.name}") for found in iter_modules(exercises.__path__)]
DOTS = "    return ...\n"
SOLUTION = re.compile(r"<summary>Solution</summary>(?:<code>(return .*?)</code>|.*?```python\n(.*?)```)", re.DOTALL)
TESTS = PROJECT / "tests"


# ---------------------------------------------------------------- what is folded in the notebooks


def folded() -> list:
    """Each starter that ends in `return ...`, with the folded solution above it in that line's place."""
    found = []
    for path in sorted((PROJECT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for text, starter in zip(cells, cells[1:], strict=False):
            if (
                starter.cell_type == "code"
                and starter.source.startswith(("def ", "import", "from fsdp_helpers"))
                and DOTS in starter.source
            ):
                solution = SOLUTION.search(text.source)
                lines = indent(unescape(solution[1] or solution[2]), "    ")
                name = re.search(r"check_\w+", starter.source)[0]
                found.append(pytest.param(starter.source.replace(DOTS, lines), id=name))
    return found


@pytest.mark.parametrize("code", folded())
def test_the_folded_solution_is_accepted(code):
    """Run as the reader's cell; it raises NotYet if the checker refuses it."""
    checker = re.search(r"exercises\.(check_\w+)", code)[1]
    (chapter,) = [chapter for chapter in CHAPTERS if hasattr(chapter, checker)]
    exec(compile(code, "solution", "exec"), {"exercises": chapter})


def test_the_notebooks_have_these_small_exercises():
    assert len(folded()) >= 9


def test_every_checker_that_a_notebook_calls_is_tested():
    notebooks = "".join(path.read_text() for path in (PROJECT / "notebooks").glob("*.ipynb"))
    tests = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    called = set(re.findall(r"exercises\.(check_\w+)\(", notebooks))
    assert {name for name in called if not re.search(rf"\b{name}\b", tests)} == set()


def test_a_notebook_shows_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_cell("from fsdp_helpers.teaching.exercises.notebook_01 import check_parameter_count as check; check(...)")
    said = capsys.readouterr()
    assert re.sub(r"\x1b\[[\d;]*m", "", said.out + said.err).strip() == "Not yet: replace the ... with your answer"


# ---------------------------------------------------------------- verdicts


@pytest.fixture
def nothing_solved(monkeypatch):
    monkeypatch.setattr("fsdp_helpers.teaching.exercises.answers._solved", set())


def test_what_is_solved_is_counted_once_for_each_notebook(nothing_solved):
    right = notebook_01.check_parameter_count(204_928)
    assert (right.count, notebook_01.check_parameter_count(204_928).count) == ("1 of 3 solved", "1 of 3 solved")
    assert notebook_01.check_largest_model(lambda size: size // 16).count == "2 of 3 solved"
    assert notebook_06.check_checkpoint_bytes(lambda num_params: 12 * num_params).count.startswith("1 of ")  # of 06
    with pytest.raises(NotYet):
        notebook_01.check_largest_batch(...)


def test_success_is_green_and_says_so_in_words(nothing_solved):
    formats, _ = DisplayFormatter().format(notebook_01.check_parameter_count(204_928))
    assert formats["text/plain"] == "✓ Right: 204,928 parameters. (1 of 3 solved)"
    assert "✓ Right: 204,928 parameters. (1 of 3 solved)" in formats["text/html"]
    assert "color:#15803d" in formats["text/html"]


class Awkward(float):
    """A number that cannot be written with thousands separated."""

    def __format__(self, how):
        raise TypeError("no")


def test_an_answer_that_the_checker_did_not_expect_does_not_show_it():
    with pytest.raises(NotYet, match="this answer can't be checked: TypeError: no") as refused:
        notebook_01.check_parameter_count(Awkward(7))
    assert refused.value.__suppress_context__


def test_not_yet_is_amber_and_a_crash_is_red():
    def fails():
        raise KeyError("no such name")

    with pytest.raises(answers.NotYet) as missing:
        answers.expect_answered(...)
    with pytest.raises(answers.Crash) as crashed:
        answers.call(fails)
    told = [caught.value._render_traceback_()[0] for caught in (missing, crashed)]
    assert [line.partition("Not yet:\x1b[0m ")[0] for line in told] == ["\x1b[30;43m", "\x1b[97;41m"]
    assert "KeyError" in told[1] and len(told) == 2
