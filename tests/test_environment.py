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
LOCK, OLDEST = ((PROJECT / name).read_text() for name in ("requirements.lock", "oldest.lock"))
PINNED = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(lock: str) -> dict[str, set[str]]:
    """The versions that a lock allows: name -> one, or one per Python."""
    found = {}
    for name, version in PINNED.findall(lock):
        found.setdefault(plain_name(name), set()).add(version)
    return found


def lower_ends(ranges: list[str]) -> dict[str, str]:
    return dict(one.split(">=") for one in ranges)


def numbers(version: str) -> tuple[int, ...]:
    """As numbers, without zeros at the end: 2.11.0 is 2.11."""
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_lock_is_within_every_range():
    locked = pinned(LOCK)
    for name, lowest in lower_ends(RANGES + TOOLS).items():
        (version,) = locked[name]
        assert numbers(version) >= numbers(lowest), name


def test_the_oldest_lock_is_the_lower_end_of_every_range():
    locked = pinned(OLDEST)
    for name, lowest in lower_ends(RANGES).items():
        (version,) = locked[name]
        assert numbers(version) == numbers(lowest), name


@pytest.mark.parametrize("lock", [LOCK, OLDEST], ids=["lock", "oldest"])
def test_a_lock_pins_all_and_names_no_registry(lock):
    lines = [line for line in lock.splitlines() if line and not line.lstrip().startswith("#")]
    assert len(lines) > 100, "the packages behind the direct ones, too"
    assert [line for line in lines if not PINNED.match(line)] == []
    assert "://" not in lock


@pytest.mark.skipif("CI" not in os.environ, reason="only CI's environment must hold nothing else; yours may")
def test_what_is_installed_is_the_lock():
    """Whatever the registry has received since, `pip freeze` in a fresh environment is the lock, name by name."""
    here = {
        plain_name(one.name): one.version for one in distributions(path=[get_path("purelib")])
    }  # setuptools brings copies of its own
    lock = pinned(LOCK if here["torch"] in pinned(LOCK)["torch"] else OLDEST)
    brought_along = {"fsdp-helpers", "pip"}  # the project itself, and what a virtual environment begins with
    assert here.keys() - lock.keys() - brought_along == set(), "installed, and in no lock"
    assert {name: version for name, version in here.items() if version not in lock.get(name, {version})} == {}


def test_conda_takes_the_lock():
    text = (PROJECT / "environment.yml").read_text()
    lines = re.findall(r"^\s*- (?!pip:)(.*)$", text.partition("dependencies:")[2], re.MULTILINE)
    assert [line.partition("#")[0].strip() for line in lines] == [
        "python=3.11",
        "pip",
        "make",
        "--requirement requirements.lock",
        "--editable .",
    ]
