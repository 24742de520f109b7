"""What a person gets: a wheel that holds every subpackage, and a page whose tree is that of the folders."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from leftovers import PROJECT

from fsdp_helpers.field_guide import FOLDER

NEEDED_FOR_A_WHEEL = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def files() -> set[str]:
    """Every file of the package, as a path from the project's root."""
    paths = (path for path in (PROJECT / "fsdp_helpers").rglob("*") if path.is_file())
    return {path.relative_to(PROJECT).as_posix() for path in paths if path.parent.name != "__pycache__"}


def test_a_wheel_holds_every_room(tmp_path):
    pytest.importorskip("setuptools", minversion="77")  # as the build asks for in pyproject.toml
    for name in NEEDED_FOR_A_WHEEL:
        shutil.copy(PROJECT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "fsdp_helpers", tmp_path / "fsdp_helpers", ignore=ignored)
    shutil.copytree(FOLDER, tmp_path / "notebooks" / "failures", ignore=ignored)
    (tmp_path / "notebooks" / "take_home").mkdir()  # a folder beside the package, which a wheel leaves out
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    guide = {f"fsdp_helpers/failures/{path.name}" for path in FOLDER.iterdir() if path.is_file()}
    assert held == files() | guide
    explains_where_only_it_is(wheel, tmp_path / "installed")


def explains_where_only_it_is(wheel: Path, folder: Path) -> None:
    """Check that `explain` finds the field guide without a checkout."""
    zipfile.ZipFile(wheel).extractall(folder)
    command = [sys.executable, "-m", "fsdp_helpers", "explain", "got mixed torch.Tensor and DTensor"]
    variables = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0 and "fsdp_helpers/failures/crash-mixed-tensor-dtensor.py" in done.stdout, done.stderr


def tree_of(text: str) -> list[str]:
    """The paths that a tree names: two spaces a level, the name first, folders with a slash at the end."""
    paths, folders = [], []
    for line in text.splitlines():
        spaces, name = re.match(r"( *)(\S+)", line).groups()
        folders[len(spaces) // 2 :] = [name]
        paths.append("".join(folders))
    return paths


def test_the_tree_of_the_files_names_every_subpackage_and_nothing_that_is_gone():
    section = (PROJECT / "CONTRIBUTING.md").read_text().partition("\n## The files\n")[2]
    named = tree_of(section.split("```\n")[1])
    assert [path for path in named if not (PROJECT / path).exists()] == []
    subpackages = {f"fsdp_helpers/{Path(path).parts[1]}/" for path in files() if len(Path(path).parts) > 2}
    assert {path for path in named if path.count("/") == 2 and path.startswith("fsdp_helpers/")} == subpackages


def test_the_makefile_picks_tests_that_exist():
    """A word that picks none would leave a check that passes with nothing to check."""
    picks = re.findall(r'-k "([^"]+)"((?: tests/\S+\.py)+)', (PROJECT / "Makefile").read_text())
    assert picks
    for words, paths in picks:
        source = "".join((PROJECT / path).read_text() for path in paths.split())
        assert [
            word for word in words.split(" or ") if not re.search(rf"^def test_\w*{word}", source, re.MULTILINE)
        ] == []


def test_a_clone_by_git_for_windows_keeps_scripts_that_run(tmp_path):
    """`core.autocrlf=true`, its default, would give every text file line ends that no shell reads."""
    if not (PROJECT / ".git").exists():
        pytest.skip("no git repository to clone")
    clone = tmp_path / "clone"
    command = ["git", "clone", "--quiet", "--config", "core.autocrlf=true", str(PROJECT), str(clone)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    listed = subprocess.run(["git", "ls-files", "--eol"], cwd=clone, check=True, capture_output=True, text=True).stdout
    assert [line for line in listed.splitlines() if "w/crlf" in line or "w/mixed" in line] == []
    paths = [clone / line.split("\t")[1] for line in listed.splitlines() if "w/lf" in line]
    shells = {path: found[1] for path in paths if (found := re.match(r"#!.*\b(sh|bash)\n", path.read_text()))}
    assert len(shells) >= 5
    for script, shell in shells.items():
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not done.stderr, f"{script.relative_to(clone)}: {done.stderr}"


def test_the_version_is_the_same_everywhere():
    said = {
        "pyproject.toml": r'^version = "(.+)"$',
        "fsdp_helpers/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (.+)$",  # the newest comes first
    }
    found = {name: re.search(line, (PROJECT / name).read_text(), re.MULTILINE)[1] for name, line in said.items()}
    assert len(set(found.values())) == 1, found
