"""Fixtures of all tests: data folders, the command line, and a look at what is left behind."""

import gzip
import multiprocessing.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchvision.datasets import MNIST

PROJECT = Path(__file__).resolve().parent.parent
PACKED_MNIST = PROJECT.parent / "shared" / "mnist"  # where a workplace may keep the four packed files
SESSION_VARIABLE, SESSION_MARK = "FSDP_TESTS_SESSION", uuid.uuid4().hex
END_S = 10.0  # processes that are on their way out get this long


def pytest_collection_modifyitems(items):
    if torch.cuda.device_count() == 0:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


# ---------------------------------------------------------------- nothing is left behind


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory):
    """After the last test: no process that a test started, and no file in the temporary folder."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is,
    multiprocessing.util.get_temp_dir()  # and so does multiprocessing's, which it needs until this process ends
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="t-") as folder:
        patch.setenv(SESSION_VARIABLE, SESSION_MARK)  # every process started from here on inherits it
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        assert processes_of_this_session() == {}
        assert os.listdir(folder) == [], "left in the temporary folder"


def processes_of_this_session() -> dict[int, str]:
    """Process id -> command of all that still runs: multiprocessing's two helpers of this process do not count."""
    deadline_s = time.monotonic() + END_S
    while found := {pid: command for pid, command in _marked_processes() if not _is_own_helper(pid, command)}:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    return found


def _marked_processes():
    mark = f"{SESSION_VARIABLE}={SESSION_MARK}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is not ours to read


def _is_own_helper(pid: int, command: str) -> bool:
    """The fork server's children have its command line too; they are not children of this process."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return True
    return parent == os.getpid() and ("multiprocessing.forkserver" in command or "resource_tracker" in command)


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------- data


@pytest.fixture(scope="session", autouse=True)
def no_network():
    """No test reaches for a mirror out there; the address that stands in for it refuses every connection."""
    with pytest.MonkeyPatch.context() as patch, socket.socket() as never_listening:
        never_listening.bind(("127.0.0.1", 0))
        patch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{never_listening.getsockname()[1]}/"])
        yield


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory) -> Path:
    """A data folder that holds the real MNIST."""
    candidates = [Path(os.environ["FSDP_DATA_DIR"])] if os.environ.get("FSDP_DATA_DIR") else []
    for folder in [*candidates, PROJECT / "data"]:
        if all((folder / "MNIST" / "raw" / Path(name).stem).exists() for name, _ in MNIST.resources):
            return folder
    if not PACKED_MNIST.is_dir():
        pytest.skip("MNIST is in none of the places where the tests look, and they download nothing")
    folder = tmp_path_factory.mktemp("mnist")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, _ in MNIST.resources:
        raw.joinpath(Path(name).stem).write_bytes(gzip.decompress((PACKED_MNIST / name).read_bytes()))
    return folder


@pytest.fixture(scope="session")
def packed_mnist(request) -> dict[str, bytes]:
    """The four packed files, as a mirror serves them: name -> content."""
    folders = [PACKED_MNIST] if PACKED_MNIST.is_dir() else [request.getfixturevalue("mnist_dir") / "MNIST" / "raw"]
    names = [name for name, _ in MNIST.resources]
    if not all((folders[0] / name).exists() for name in names):
        pytest.skip("the packed files of MNIST are not at hand")
    return {name: (folders[0] / name).read_bytes() for name in names}


@pytest.fixture
def digits_dir(tmp_path) -> Path:
    """A data folder without MNIST; with no mirror in reach, runs use the bundled digits."""
    return tmp_path / "no-mnist"


# ---------------------------------------------------------------- the command line


@pytest.fixture
def run_cli(tmp_path):
    """Run the command line in a process of its own, in an empty folder; `starter` replaces the interpreter."""

    def run(*arguments, starter=(sys.executable,), offline=False, timeout_s=90, **environment):
        program = [str(Path(__file__).with_name("offline.py"))] if offline else ["-m", "fsdp_helpers"]
        home = tmp_path / "cwd"
        home.mkdir(exist_ok=True)
        command = [*starter, *program, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
        return subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )

    return run


@pytest.fixture
def torchrun() -> str:
    """The path of torchrun beside this interpreter, or on the search path."""
    found = shutil.which("torchrun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert found, "torchrun comes with torch, but is not on the search path"
    return found
