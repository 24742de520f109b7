"""environment.yml and pyproject.toml name one tested set."""

import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


def pinned_versions(extra: str) -> dict[str, str]:
    """What `pip install .[extra]` brings: name -> version."""
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return dict(requirement.split("==") for requirement in extras[extra])


def versions_of_the_tested_set() -> dict[str, str]:
    return pinned_versions("tested")


def lowest_versions() -> dict[str, str]:
    """The lower end of every range: name -> version."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return dict(requirement.split(">=") for requirement in project["dependencies"])


@pytest.fixture(scope="module")
def dependency_lines() -> list[str]:
    """The lines of environment.yml that name a dependency."""
    text = (PROJECT / "environment.yml").read_text()
    lines = text.partition("dependencies:")[2].splitlines()
    return [line.strip().removeprefix("- ") for line in lines if re.match(r"\s*- (?!pip:)", line)]


def test_environment_pins_the_tested_set(dependency_lines):
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", "\n".join(dependency_lines), re.MULTILINE))
    wanted = versions_of_the_tested_set()
    assert {name: pinned.get(name) for name in wanted} == wanted


def test_environment_pins_nothing_else(dependency_lines):
    names = {re.match(r"[\w-]+", line).group() for line in dependency_lines if line[0].isalpha()}
    project_itself = {"fsdp-helpers"}
    assert names - project_itself - {"python", "pip", "make"} == set(versions_of_the_tested_set())


def test_every_dependency_says_what_it_is_for(dependency_lines):
    without = [line for line in dependency_lines if not re.search(r"#\s*\w+", line)]
    assert without == []


def test_the_oldest_set_is_the_lower_end_of_every_range():
    assert pinned_versions("oldest") == lowest_versions()


def test_the_tested_set_is_within_the_range():
    lowest, tested = lowest_versions(), versions_of_the_tested_set()
    assert set(lowest) == set(tested)

    def numbers(version):
        return tuple(int(part) for part in version.split("."))

    assert all(numbers(tested[name]) >= numbers(lowest[name]) for name in tested)
