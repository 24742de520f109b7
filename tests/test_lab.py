"""How JupyterLab is opened, and the copies to work in; a browser sees the rest, in tests/browser."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyterlab_server.settings_utils import _get_overrides
from leftovers import PROJECT

COPIES = PROJECT / "lab" / "working_copies.py"


def copies(work: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, COPIES, work, *arguments], capture_output=True, text=True, check=False)


def test_the_kernel_has_the_name_of_the_tutorial_and_runs_in_the_environment(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(PROJECT / "lab"))
    spec = KernelSpecManager().get_kernel_spec("python3")  # the name that the notebooks have
    assert spec.display_name == "FSDP, learned by running it"
    assert spec.argv[0] == sys.executable or spec.argv[0] == "python"  # jupyter_client puts its own in the place


def test_settings_are_found_and_ask_no_website(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(PROJECT / "lab" / "config"))
    overrides, error = _get_overrides(str(tmp_path))
    assert error == ""
    news = overrides["@jupyterlab/apputils-extension:notification"]
    assert news == {"fetchNews": "false", "checkForUpdates": False}


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
    assert copies(work).stdout == f"{work}: 1 new file(s); what was there is as it was\n"
    assert (work / "03_fsdp.ipynb").read_text() == "solved"


def test_an_exercise_is_reset_and_the_attempts_stay(tmp_path):
    original = json.loads((PROJECT / "notebooks" / "03_fsdp.ipynb").read_text())
    for attempt in ("first", "second"):
        copies(tmp_path)
        (tmp_path / "03_fsdp.ipynb").write_text(attempt)
        assert copies(tmp_path, "--reset", "03").returncode == 0
    assert json.loads((tmp_path / "03_fsdp.ipynb").read_text()) == original
    kept = [tmp_path / f"03_fsdp_before{number}.ipynb" for number in ("", "_2")]
    assert [path.read_text() for path in kept] == ["first", "second"]


@pytest.mark.parametrize("number", ["", "99", "three"])
def test_a_notebook_that_is_not_there_is_not_reset(tmp_path, number):
    done = copies(tmp_path, "--reset", number)
    assert done.returncode == 1 and done.stderr == f"there is no notebook {number!r}; give its number, such as 03\n"


@pytest.mark.parametrize("path", ["work/03_fsdp.ipynb", "notebooks/my_ddp.py", "work/my_unit.py"])
def test_what_working_leaves_is_ignored(path):
    done = subprocess.run(["git", "check-ignore", "--quiet", path], cwd=PROJECT, check=False)
    if done.returncode == 128:
        pytest.skip("this copy of the project is no git checkout")
    assert done.returncode == 0
