"""The ways in besides `make lab` on Linux: links to hosted machines, and containers."""

import json
import re
import subprocess
import sys
from unittest.mock import patch

import nbformat
import pytest
from leftovers import PROJECT

with patch("sys.path", [str(PROJECT / "docs"), *sys.path]):
    import links

CELLS = {cell.id: cell.source for cell in nbformat.read(PROJECT / "docs" / "colab.ipynb", as_version=4).cells}


@pytest.fixture
def project(tmp_path):
    """A folder whose pyproject.toml has an address, or none."""

    def with_address(address: str):
        (tmp_path / "pyproject.toml").write_text(f'[project]\n[project.urls]\nRepository = "{address}"\n')
        return tmp_path

    return with_address


def test_without_an_address_whatever_needs_it_fails_with_a_sentence(project, monkeypatch, capsys):
    monkeypatch.setattr(links.address, "__defaults__", (project(""),))
    assert links.main([]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error == f"links: {links.MISSING}\n" and "this repository's address" in error
    with pytest.raises(SystemExit, match="set ADDRESS in the cell above to this repository's address"):
        exec('ADDRESS, FOLDER = "", "fsdp"\n' + CELLS["clone"], {})


def test_the_address_is_one_setting(project):
    """The only file that can't read it is the notebook that clones: it has the same, and texts name none."""
    try:
        address = links.address()
    except ValueError:
        address = ""
    assert re.search(r'^ADDRESS = "(.*)"  #', CELLS["address"], re.MULTILINE)[1] == address
    for name in ("README.md", "notebooks/WORKSHOP.md"):
        assert "this repository's address" in (PROJECT / name).read_text() or address, name
    found = links.links(links.address(project("https://github.com/OWNER/NAME.git")), "https://hub.example.org/")
    assert found["clone"] == "git clone https://github.com/OWNER/NAME"
    assert found["Colab"].endswith("/github/OWNER/NAME/blob/main/docs/colab.ipynb")
    assert found["Codespaces"].endswith("/OWNER/NAME")
    assert found["JupyterHub"] == (
        "https://hub.example.org/hub/user-redirect/git-pull?repo=https%3A%2F%2Fgithub.com%2FOWNER%2FNAME&branch=main"
        "&urlpath=lab%2Ftree%2FNAME%2Fnotebooks%2F00_start_here.ipynb"
    )
    assert links.links("https://git.example.org/a/b").keys() == {"clone", "Kaggle"}, "the others open GitHub only"


@pytest.mark.parametrize(("variables", "torch"), [({}, "cpu"), ({"TORCH": ""}, "")])
def test_a_container_is_set_up_by_one_script(variables, torch):
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": sys.executable} | variables
    command = ["sh", PROJECT / "docs" / "container.sh", "--dry-run"]
    done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        f"make --no-print-directory .venv/installed TORCH={torch} PYTHON={sys.executable}",
        ".venv/bin/python -m fsdp_helpers doctor",
    ]


def test_both_containers_run_that_script_and_ask_for_memory():
    dockerfile = (PROJECT / "Dockerfile").read_text()
    assert "\nRUN sh docs/container.sh\n" in dockerfile and "--memory 8g --shm-size 1g" in dockerfile
    text = (PROJECT / ".devcontainer" / "devcontainer.json").read_text()
    settings = json.loads(re.sub(r"^//.*$", "", text, flags=re.MULTILINE))
    assert (
        settings["postCreateCommand"] == "sh docs/container.sh" and f" AS {settings['build']['target']}\n" in dockerfile
    )
    assert settings["hostRequirements"]["memory"] == "8gb" and "--shm-size=1g" in settings["runArgs"]
