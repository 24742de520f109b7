"""What is tried with every build exercise; the tests of its chapter say which one, and with which answers.

What is folded in the notebook as the solution is what is run here.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import nbformat
import pytest
from leftovers import PROJECT

from fsdp_helpers.teaching.exercises.answers import NotYet

SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.DOTALL)
ON_TWO_RANKS = {"ranks": (2,)}  # half of the evidence, in one launch


class Exercise(NamedTuple):
    """A build exercise as its notebook has it."""

    starter: str
    solution: str
    check: str  # the call of the checker


def exercises() -> dict[str, Exercise]:
    """The build exercises of all notebooks, by the module that the reader writes."""
    found = {}
    for path in sorted((PROJECT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for text, starter, check in zip(cells, cells[1:], cells[2:], strict=False):
            magic, _, code = starter.source.partition("\n")
            is_exercise = "exercise" in starter.metadata.get("tags", [])  # a chapter's own modules are not
            if is_exercise and starter.cell_type == "code" and magic.startswith("%%writefile my_"):
                (solution,) = SOLUTION.findall(text.source)
                found[magic.split()[1].removesuffix(".py")] = Exercise(code, solution, check.source)
    return found


EXERCISES = exercises()


class BuildTests:
    """Tests of one build exercise; a subclass gives its module, its checker, and what the checker has to say."""

    name: str  # of the module that the reader writes
    checker: Callable[..., str]
    starter: str  # what is said of the starter
    wrong: list[tuple[list[tuple[str, str]], str]]  # changes to the folded solution, and what is said of the result
    settings: dict = {}  # of the checker, for the folded solution and for other ways
    settings_of_wrong: dict = {}  # and for what is refused

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "changes" in metafunc.fixturenames:
            metafunc.parametrize("changes, message", self.wrong)

    @pytest.fixture
    def write(self, tmp_path, monkeypatch) -> Iterator[Callable[[str], None]]:
        """Write the reader's module; ranks and this process find it in the current folder's stead."""
        monkeypatch.syspath_prepend(tmp_path)
        yield (tmp_path / f"{self.name}.py").write_text
        sys.modules.pop(self.name, None)

    def accept(self, **settings) -> None:
        assert self.checker(self.name, **settings).startswith("Right")

    def refuse(self, message: str) -> None:
        """Expect one line that matches `message`."""
        with pytest.raises(NotYet, match=message) as refused:
            self.checker(self.name, **self.settings_of_wrong)
        assert len(str(refused.value).splitlines()) == 1

    @classmethod
    def changed(cls, *changes: tuple[str, str]) -> str:
        """The folded solution with something in it changed."""
        code = EXERCISES[cls.name].solution
        for old, new in changes:
            assert old in code, f"{old!r} is not in the solution of {cls.name}"
            code = code.replace(old, new)
        return code

    def test_the_folded_solution_is_accepted(self, write):
        write(EXERCISES[self.name].solution)
        self.accept(**self.settings)

    def test_the_starter_fails_loudly(self, write):
        write(EXERCISES[self.name].starter)
        self.refuse(self.starter)

    def test_wrong_builds_are_refused_in_one_line(self, write, changes, message):
        write(self.changed(*changes))
        self.refuse(message)

    def test_modules_that_cannot_be_read(self, write):
        """Before anything is launched."""
        self.refuse(f"there is no {self.name}.py here; run the cell that writes it")
        write("def broken(:\n")
        self.refuse(rf"{self.name}.py can't be imported: SyntaxError: .*line 1")
        write("# nothing yet\n")
        self.refuse(f"{self.name}.py doesn't define ")
        with pytest.raises(NotYet, match="it should be the name of your module"):
            self.checker(sys)


class BuildTestsOnRanks(BuildTests):
    """Tests of a build exercise that is run on ranks: 2 here, 3 with the long evidence."""

    settings = ON_TWO_RANKS

    @pytest.mark.long
    def test_the_folded_solution_is_accepted_on_three_ranks_too(self, write):
        write(EXERCISES[self.name].solution)
        self.accept(ranks=(3,))
