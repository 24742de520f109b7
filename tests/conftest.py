"""Fixtures of all tests: data folders, the command line, and a look at what is left behind."""

import gc
import gzip
import multiprocessing.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# Nothing that is imported and collected is garbage: looking for some takes a third of the 11 s that each worker needs.
gc.disable()

# OpenMP reads this when torch is loaded, here and in all that a test starts: threads that wait sleep. Left alone, they
# spin, and where the cores are in use a step on two threads takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A number of threads that your shell may set; what torch and torchrun do without one is what tests are about.
os.environ.pop("OMP_NUM_THREADS", None)

import pytest
import torch
import torch.distributed as dist
from leftovers import (
    PROJECT,
    SESSION_MARK,
    SESSION_VARIABLE,
    end_processes,
    open_ranks,
    process_ids,
    processes_of_this_session,
)
from torchvision.datasets import MNIST

from fsdp_helpers.data.source import offline

PACKED_MNIST = PROJECT.parent / "shared" / "mnist"  # where a workplace may keep the four packed files
OFFLINE = offline()  # asked for once: the tests themselves start without the variable
LONGEST = ("notebooks", "take_home", "ranks", "training")  # folders whose files take longest
LONG_TIMEOUT_S = 1800  # of a test of the long evidence; pyproject.toml has that of all others


def pytest_configure(config):
    """Hide GPUs, unless the tests on them are asked for: all others run CPU ranks, also where `auto` would be CUDA."""
    asked_for = "gpu" in config.option.markexpr.replace("not gpu", "").split()
    if not asked_for and torch.cuda.device_count():  # counting initializes nothing
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # pytest-xdist would begin the files with the most tests first; the next function says which take longest.
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)  # begun last, they would be waited for alone
    for item in items:
        if "long" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        if item.get_closest_marker("gpu") and torch.cuda.device_count() == 0:  # a folder may have that name, too
            item.add_marker(pytest.mark.skip(reason="no CUDA device here, or not asked for: pytest -m gpu"))
        if "mnist_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("mnist")


def pytest_collection_finish():
    """Leave all that is loaded by now out of later collections.

    Each plan and each trace begins with one, and looking through torch, scikit-learn and thousands of tests again takes
    up to a second.
    """
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # libraries tidy up at the end, and complain of what they still find


# ---------------------------------------------------------------- nothing is left behind


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """A folder for all temporary files of the session; every process that a test starts carries the session's mark."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is,
    multiprocessing.util.get_temp_dir()  # and so does multiprocessing's, which it needs until this process ends
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="t-") as folder:
        patch.setenv(SESSION_VARIABLE, SESSION_MARK)  # every process started from here on inherits it
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield folder
        assert os.listdir(folder) == [], "left in the temporary folder by a fixture that several tests share"


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive():
    """Under nohup and in the background of a shell, SIGINT is ignored, also by all that a test starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def nothing_left(temporary_folder):
    """After each test: no process that it started, and no file in the temporary folder.

    The test that left something is the one that fails, and the processes are ended, whatever happened in it.
    """
    files_before, processes_before, ranks_before = set(os.listdir(temporary_folder)), process_ids(), open_ranks()
    yield
    assert set(open_ranks()) <= set(ranks_before), "these ranks were left open"
    shared_processes = processes_before.union(*(ranks.pids for ranks in ranks_before))  # some may have been restarted
    if process_ids() - shared_processes:  # else it started none that still runs
        processes = processes_of_this_session(shared_processes)
        end_processes(set(processes))
        assert processes == {}, "these processes were left, and are ended now"
    shared_folders = {Path(ranks._processes.folder.name).name for ranks in ranks_before}
    files = set(os.listdir(temporary_folder)) - files_before - shared_folders
    for path in (Path(temporary_folder, name) for name in files):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert files == set(), "these were left in the temporary folder, and are removed now"


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


@pytest.fixture(scope="session", autouse=True)
def digits_unless_asked():
    """With FSDP_OFFLINE no test gets to see MNIST; a test of the variable itself sets it anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FSDP_OFFLINE", raising=False)
        yield


def skip_if_offline():
    if OFFLINE:
        pytest.skip("FSDP_OFFLINE asks for the digits, this one needs MNIST")


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory) -> Path:
    """A data folder that holds the real MNIST."""
    skip_if_offline()
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


@pytest.fixture
def digits_dir(tmp_path) -> Path:
    """A data folder without MNIST; with no mirror in reach, runs use the bundled digits."""
    return tmp_path / "no-mnist"


# ---------------------------------------------------------------- the command line


@pytest.fixture
def run_cli(tmp_path):
    """Run the command line in a process of its own, in an empty folder; `starter` replaces the interpreter."""

    def run(*arguments, starter=(sys.executable,), offline=False, timeout_s=240, **environment):
        program = [str(Path(__file__).parent / "helpers/offline.py")] if offline else ["-m", "fsdp_helpers"]
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
