"""Everything in here runs beside simulated GPUs: marked `simulated`, and skipped where they cannot be built."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_driver import SimulatedGpus, build, cuda_headers
from leftovers import PROJECT

HELPERS = PROJECT / "tests/helpers"
LIMIT_S = 850.0  # of a child process, such as a whole notebook


def pytest_collection_modifyitems(items):
    for item in items:
        if "/simulated_gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.simulated)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> Path:
    """The folder of the driver's libraries, built once."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("simulated GPUs need Linux and gcc")
    if cuda_headers() is None:
        pytest.skip(
            "simulated GPUs need the CUDA headers that come with torch's CUDA packages; this torch is for the CPU"
        )
    folder = tmp_path_factory.mktemp("simulated-gpu")
    build(folder)
    return folder


@pytest.fixture
def gpus(libraries, tmp_path) -> SimulatedGpus:
    """The simulated GPUs, with a log of this test's own."""
    return SimulatedGpus(libraries, tmp_path / "uses.log")


@pytest.fixture(scope="session")
def run_beside(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command with some variables more, in `folder` or an empty one; fail unless it ends with `status`."""

    def run(
        command: list, variables: dict[str, str], *, folder: Path | None = None, status: int = 0
    ) -> subprocess.CompletedProcess:
        paths = {"PYTHONPATH": f"{HELPERS}{os.pathsep}{PROJECT}", "FSDP_OFFLINE": "1"}
        done = subprocess.run(
            list(map(str, command)),
            cwd=folder or tmp_path_factory.mktemp("beside"),
            env={**os.environ, **paths, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def run_python(run_beside, tmp_path) -> Callable[[str, dict[str, str]], str]:
    """Run Python code beside simulated GPUs, in the test's folder; what it prints."""

    def run(code: str, variables: dict[str, str]) -> str:
        return run_beside([sys.executable, "-c", textwrap.dedent(code)], variables, folder=tmp_path).stdout

    return run
