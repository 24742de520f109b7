"""A laptop set up from a folder, and from a machine that serves it: no other network is asked."""

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leftovers import PROJECT

from fsdp_helpers.cli.lab import offline
from fsdp_helpers.data.mnist import MNIST_FILES

# What pip is told, and where from, is what the tests look at; pip itself is not started.
MAKEFILE = """.venv/installed:
	mkdir .venv
	env | grep ^PIP_ | sort > .venv/installed
"""


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments) -> None:
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A small project in place of this one, prepared by the real code."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    project, data = tmp_path / "project", tmp_path / "data"
    (data / "MNIST" / "raw").mkdir(parents=True)
    for name in MNIST_FILES:
        (data / "MNIST" / "raw" / f"{name}.gz").write_bytes(b"digits")
    project.mkdir()
    (project / "Makefile").write_text(MAKEFILE)
    (project / "requirements.lock").write_text("# nothing\n")
    git = ["git", "-C", str(project), "-c", "user.name=T", "-c", "user.email=t@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], check=True)
    prepared = tmp_path / "offline"
    offline.prepare(project, prepared, data)
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
    command = [sys.executable, folder / "laptop.py", source]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("served", [True, False])
def test_a_laptop_gets_all_of_it(folder, address, tmp_path, served):
    source = address if served else str(folder)
    done = set_up(folder, source, tmp_path / "laptop")
    assert done.returncode == 0, done.stderr
    clone = tmp_path / "laptop" / "fsdp"
    names = {path.name for path in (clone / "data" / "MNIST" / "raw").iterdir()}
    assert names == {f"{name}.gz" for name in MNIST_FILES}
    assert (clone / "data" / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz").read_bytes() == b"digits"
    told = dict(line.split("=", 1) for line in (clone / ".venv" / "installed").read_text().splitlines())
    assert told["PIP_NO_INDEX"] == "1" and told["PIP_CONFIG_FILE"] == os.devnull
    assert told["PIP_FIND_LINKS"] == f"{address if served else folder.resolve().as_uri()}/packages/"
    assert told["PIP_TRUSTED_HOST"] == ("127.0.0.1" if served else "localhost")


def test_data_are_copied_as_a_run_has_downloaded_them_and_only_if_whole(tmp_path):
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in MNIST_FILES:  # the packed files of a download are not kept
        assert offline.copy_data(tmp_path / "data", tmp_path / "copy") == []
        (raw / name).write_bytes(b"digits")
    assert offline.copy_data(tmp_path / "data", tmp_path / "copy") == list(MNIST_FILES)
    assert {path.name for path in (tmp_path / "copy").iterdir()} == set(MNIST_FILES)


def test_three_laptops_at_once_are_served_by_one_machine(folder, address, tmp_path):
    laptops = [tmp_path / f"laptop-{number}" for number in range(3)]
    with ThreadPoolExecutor(len(laptops)) as pool:
        ended = list(pool.map(lambda where: set_up(folder, address, where), laptops))
    assert [done.returncode for done in ended] == [0, 0, 0], [done.stderr for done in ended]
    assert all((where / "fsdp" / ".venv" / "installed").exists() for where in laptops)


def test_what_cannot_work_is_said_in_one_line(folder, tmp_path):
    where = tmp_path / "laptop"
    (where / "fsdp").mkdir(parents=True)
    done = set_up(folder, str(folder), where)
    assert done.returncode == 1 and "is there already" in done.stderr and done.stderr.count("\n") == 1
    (where / "fsdp").rmdir()
    contents = json.loads((folder / "contents.json").read_text())
    (folder / "contents.json").write_text(json.dumps(contents | {"python": ["3", "99"]}))
    done = set_up(folder, str(folder), where)
    assert done.returncode == 1 and "the packages are for Python 3.99" in done.stderr
    assert "Traceback" not in done.stderr and not (where / "fsdp").exists()


def test_a_source_that_does_not_answer_is_named(folder, tmp_path):
    done = set_up(folder, str(tmp_path / "no-stick"), tmp_path / "laptop")
    assert done.returncode == 1 and "no-stick/contents.json does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_needs_nothing_of_the_project():
    text = (PROJECT / "fsdp_helpers" / "cli" / "lab" / "laptop.py").read_text()
    assert "fsdp_helpers" not in text
    done = subprocess.run([sys.executable, "-I", "-S", offline.SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("usage:")
