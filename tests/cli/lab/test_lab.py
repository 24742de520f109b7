"""How JupyterLab is opened, and the copies to work in; a browser sees the rest, in tests/browser."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from jupyterlab_server.settings_utils import _get_overrides
from leftovers import PROJECT

from fsdp_helpers.__main__ import main
from fsdp_helpers.cli.lab import jupyter, working_copies

LAB = PROJECT / "fsdp_helpers" / "cli" / "lab"


def copies(work: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fsdp_helpers.cli.lab.working_copies", work, *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


def test_settings_are_found_ask_no_website_and_show_texts_rendered(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(LAB / "config"))
    overrides, error = _get_overrides(str(tmp_path))
    assert error == ""
    news = overrides["@jupyterlab/apputils-extension:notification"]
    assert news == {"fetchNews": "false", "checkForUpdates": False}
    # Links to a section are exact, and texts are read, not edited.
    assert overrides["@jupyterlab/notebook-extension:tracker"] == {"windowingMode": "none"}
    assert overrides["@jupyterlab/docmanager-extension:plugin"] == {"defaultViewers": {"markdown": "Markdown Preview"}}


def test_copies_are_complete_and_never_overwritten(tmp_path):
    work = tmp_path / "work"
    assert copies(work).returncode == 0
    originals = {path.name for path in (PROJECT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in work.glob("*.ipynb")} == originals
    assert (
        (work / "GLOSSARY.md").is_file() and list(work.glob("take_home/*.py")) and list(work.glob("reference/*.json"))
    )
    (work / "03_fsdp.ipynb").write_text("solved")
    (work / "01_local_training.ipynb").unlink()
    assert copies(work).stdout == f"{work}: files copied: 1; copies that were there already are unchanged\n"
    assert (work / "03_fsdp.ipynb").read_text() == "solved"


def test_a_copy_older_than_its_original_is_named(tmp_path, monkeypatch):
    (tmp_path / "originals").mkdir()
    for name in ("02_ddp.ipynb", "03_fsdp.ipynb"):
        (tmp_path / "originals" / name).write_text("{}")
    monkeypatch.setattr(working_copies, "ORIGINALS", tmp_path / "originals")
    work = tmp_path / "work"
    working_copies.copy_missing(work)
    assert working_copies.older_than_originals(work) == []
    now_s = (work / "03_fsdp.ipynb").stat().st_mtime
    os.utime(tmp_path / "originals" / "03_fsdp.ipynb", (now_s + 60, now_s + 60))
    assert working_copies.older_than_originals(work) == ["03_fsdp.ipynb"]


def test_an_exercise_is_reset_and_the_attempts_stay(tmp_path):
    original = json.loads((PROJECT / "notebooks" / "03_fsdp.ipynb").read_text())
    for attempt in ("first", "second"):
        copies(tmp_path)
        (tmp_path / "03_fsdp.ipynb").write_text(attempt)
        done = copies(tmp_path, "--reset", "3")
        assert done.returncode == 0 and "choose Revert" in done.stdout
    assert json.loads((tmp_path / "03_fsdp.ipynb").read_text()) == original
    kept = [tmp_path / f"03_fsdp_before{number}.ipynb" for number in ("", "_2")]
    assert [path.read_text() for path in kept] == ["first", "second"]


@pytest.mark.parametrize("number", ["", "99", "three"])
def test_a_notebook_that_is_not_there_is_not_reset(tmp_path, number):
    done = copies(tmp_path, "--reset", number)
    assert (
        done.returncode == 1 and done.stderr == f"there's no notebook {number!r}; give a notebook's number, such as 3\n"
    )


@pytest.mark.parametrize("path", ["work/03_fsdp.ipynb", "notebooks/my_ddp.py", "work/my_unit.py"])
def test_what_working_leaves_is_ignored(path):
    done = subprocess.run(["git", "check-ignore", "--quiet", path], cwd=PROJECT, check=False)
    if done.returncode == 128:
        pytest.skip("this copy of the project is no git checkout")
    assert done.returncode == 0


# ---------------------------------------------------------------- python -m fsdp_helpers lab


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[list[str]]:
    """The arguments that JupyterLab would have been started with; the variables that are set are taken back."""
    calls = []
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "signatures"))  # first: what is started inherits it
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("jupyterlab.labapp.LabApp.launch_instance", calls.append)
    return calls


def test_lab_opens_the_first_notebook_with_this_environment(started, monkeypatch):
    assert main(["lab", "--originals", "--no-browser", "--port", "9000"]) == 0
    (arguments,) = started
    assert arguments[-3:] == ["--no-browser", "--port", "9000"]
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in arguments
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


@pytest.mark.parametrize("given", [[], ["--copies", "work"]])
def test_lab_works_in_copies_in_every_route(given, started, monkeypatch, tmp_path):
    monkeypatch.setattr(jupyter, "PROJECT", tmp_path)
    monkeypatch.chdir(tmp_path if given else "/")
    assert main(["lab", *given]) == 0
    assert (tmp_path / "work" / "00_start_here.ipynb").is_file()
    assert "--LabApp.default_url=/lab/tree/work/00_start_here.ipynb" in started[0]
    with closing(sqlite3.connect(tmp_path / "signatures" / "nbsignatures.db")) as signatures:
        ((num_signed,),) = signatures.execute("SELECT count(*) FROM nbsignatures")
    assert num_signed == len(list((tmp_path / "work").glob("*.ipynb"))) > 10


def test_copies_that_cannot_be_signed_are_opened_unsigned(started, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jupyter, "PROJECT", tmp_path)
    (tmp_path / "signatures").touch()  # where a folder should be
    assert main(["lab", "--copies", str(tmp_path / "work")]) == 0
    assert len(started) == 1 and re.search(r"^the copies aren't signed: .+Error", capsys.readouterr().out, re.MULTILINE)


def test_copies_outside_what_jupyterlab_shows_are_refused(started, tmp_path, capsys):
    for folder in (tmp_path, PROJECT, PROJECT / "notebooks"):
        assert main(["lab", "--copies", str(folder)]) == 2
        assert "choose a separate folder inside" in capsys.readouterr().err
    assert started == []


def test_without_notebooks_lab_says_so_in_one_line(started, monkeypatch, tmp_path, capsys):
    """A wheel has none."""
    monkeypatch.setattr(jupyter, "ORIGINALS", tmp_path / "notebooks")
    for arguments in (["lab"], ["lab", "--originals"], ["lab", "--copies", "work"]):
        assert main(arguments) == 2
        assert "installed without the notebooks; clone the project" in capsys.readouterr().err
    assert started == [] == [*tmp_path.iterdir()]


def test_only_lab_takes_arguments_of_others(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["consolidate", "a", "b", "--no-browser"])
    assert capsys.readouterr().err == "fsdp_helpers: unrecognized arguments: --no-browser\n"
