"""The build exercises of all chapters: each is in a notebook, with a starter, a solution and its checker."""

import re
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules

import pytest
from builds import EXERCISES
from leftovers import PROJECT

from fsdp_helpers.teaching import exercises

TESTS = PROJECT / "tests"


def checkers() -> set[str]:
    """The names of all checkers that take the name of the reader's module."""
    modules = [import_module(f"{exercises.__name__}.{found.name}") for found in iter_modules(exercises.__path__)]
    named = {name: one for module in modules for name, one in vars(module).items() if name.startswith("check_")}
    return {name for name, one in named.items() if "module" in signature(one).parameters}


def test_every_checker_of_a_module_is_called_in_a_notebook_and_tested():
    called = [re.search(r"exercises\.(check_\w+)", build.check)[1] for build in EXERCISES.values()]
    assert sorted(called) == sorted(checkers())
    tested = re.findall(
        r'^    name = "(my_\w+)"$', "".join(path.read_text() for path in TESTS.rglob("test_*.py")), re.MULTILINE
    )
    assert sorted(tested) == sorted(EXERCISES)


@pytest.mark.parametrize("name", EXERCISES)
def test_starters_and_solutions_are_code_and_only_starters_have_gaps(name):
    starter, solution, check = EXERCISES[name]
    compile(starter, name, "exec"), compile(solution, name, "exec")
    assert "..." in starter and "..." not in solution
    assert re.search(rf'exercises\.check_\w+\("{name}"\)', check)
