"""The ranges of pyproject.toml, the two locks made of them, and environment.yml belong together."""

import os
import re
import tomllib
from importlib.metadata import distributions
from sysconfig import get_path

import pytest
from leftovers import PROJECT

PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
RANGES = PYPROJECT["project"]["dependencies"] + EXTRAS["notebooks"] + EXTRAS["tests"]
TOOLS = PYPROJECT["dependency-groups"]["dev"]
PINNED = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(lock: str) -> dict[str, set[str]]:
    """The versions that a lock allows, by name: one, or one per Python."""
    text = (PROJECT / lock).read_text()
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert [line for line in lines if not PINNED.match(line)] == [] and "://" not in text
    found = {}
    for name, version in PINNED.findall(text):
        found.setdefault(plain_name(name), set()).add(version)
    return found


def numbers(version: str) -> tuple[int, ...]:
    """As numbers, without zeros at the end: 2.11.0 is 2.11."""
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_locks_agree_with_the_ranges():
    newest, oldest = pinned("requirements.lock"), pinned("oldest.lock")
    assert len(newest) > 100 and len(oldest) > 100, "the packages behind the direct ones, too"
    for name, lowest in (one.split(">=") for one in RANGES + TOOLS):
        assert min(map(numbers, newest[name])) >= numbers(lowest), name
    for name, lowest in (one.split(">=") for one in RANGES):
        assert {numbers(version) for version in oldest[name]} == {numbers(lowest)}, name
    assert "--requirement requirements.lock" in (PROJECT / "environment.yml").read_text()


@pytest.mark.skipif("CI" not in os.environ, reason="only CI's environment must hold nothing else; yours may")
def test_what_is_installed_is_the_lock():
    """Whatever the registry has received since, `pip freeze` in a fresh environment is the lock, name by name."""
    here = {
        plain_name(one.name): one.version for one in distributions(path=[get_path("purelib")])
    }  # setuptools brings copies of its own
    newest, oldest = pinned("requirements.lock"), pinned("oldest.lock")
    lock = newest if here["torch"] in newest["torch"] else oldest
    brought_along = {"fsdp-helpers", "pip"}  # the project itself, and what a virtual environment begins with
    assert here.keys() - lock.keys() - brought_along == set(), "installed, and in no lock"
    assert {name: version for name, version in here.items() if version not in lock.get(name, {version})} == {}
