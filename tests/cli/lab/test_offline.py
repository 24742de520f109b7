"""A laptop set up from a folder that `make offline` has prepared, and from a machine that serves it."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import PROJECT

NAMES = {f"{part}-ubyte" for part in ("train-images", "train-labels", "t10k-images", "t10k-labels")}
# What pip is told, and where from, is what the tests look at; pip itself has nothing to install.
INSTALL = "\n.venv/installed:\n\tmkdir .venv\n\tenv | grep ^PIP_ | sort > .venv/installed\n"


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments) -> None:
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A small project in place of this one, prepared by the Makefile's own lines."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    project, raw = tmp_path / "project", tmp_path / "project" / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in NAMES:
        (raw / name).write_bytes(b"digits")
    (project / "docs").mkdir()
    shutil.copy(PROJECT / "docs" / "laptop.sh", project / "docs")
    (project / "requirements.lock").write_text("# nothing\n")
    (project / ".gitignore").write_text("data\n")
    (project / "Makefile").write_text(INSTALL.lstrip())
    git = ["git", "-C", str(project), "-c", "user.name=T", "-c", "user.email=t@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], check=True)
    prepared = tmp_path / "stick" / "offline"
    make = ["make", "--file", PROJECT / "Makefile", "--old-file", ".venv/installed", "--old-file", "pyproject.toml"]
    make += ["offline", f"BIN={Path(sys.executable).parent}", "INSTALLED=", f"OFFLINE={prepared}"]
    subprocess.run(make, cwd=project, capture_output=True, text=True, check=True)
    return prepared


@pytest.fixture
def address(folder) -> Iterator[str]:
    handler = functools.partial(Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def set_up(folder: Path, source: str, where: Path) -> subprocess.CompletedProcess:
    where.mkdir(exist_ok=True)
    command = ["sh", folder / "laptop.sh", source]
    variables = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, cwd=where, env=variables, capture_output=True, text=True, check=False, timeout=240)


def test_a_laptop_gets_all_of_it(folder, address, tmp_path):
    done = set_up(folder, address, tmp_path / "laptop")
    assert done.returncode == 0, done.stderr
    clone = tmp_path / "laptop" / "fsdp"
    assert {path.name: path.read_bytes() for path in (clone / "data" / "MNIST" / "raw").iterdir()} == dict.fromkeys(
        NAMES, b"digits"
    )
    told = dict(line.split("=", 1) for line in (clone / ".venv" / "installed").read_text().splitlines())
    assert told["PIP_NO_INDEX"] == "1" and told["PIP_CONFIG_FILE"] == os.devnull
    assert told["PIP_FIND_LINKS"] == f"{address}/packages/"
    assert told["PIP_TRUSTED_HOST"] == "127.0.0.1"


def test_what_cannot_work_is_said_in_one_line(folder, tmp_path):
    where = tmp_path / "laptop"
    (where / "fsdp").mkdir(parents=True)
    done = set_up(folder, str(folder), where)
    assert done.returncode == 1 and "is there already" in done.stderr and done.stderr.count("\n") == 1
    (where / "fsdp").rmdir()
    (folder / "contents.txt").write_text("3 99 linux\n")
    done = set_up(folder, str(folder), where)
    assert done.returncode == 1 and "the packages are for Python 3 99" in done.stderr and done.stderr.count("\n") == 1
    assert not (where / "fsdp").exists()
    assert "no-stick" in set_up(folder, str(tmp_path / "no-stick"), where).stderr
