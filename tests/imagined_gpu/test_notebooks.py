"""The notebooks beside a GPU: from top to bottom as CPU ranks, and neither a rank nor the kernel touches it."""

import subprocess
import sys

import pytest
from leftovers import PROJECT

NAMES = [path.stem for path in sorted((PROJECT / "notebooks").glob("*.ipynb")) if path.stem[:2] <= "10"]
CELL_S = 600


@pytest.fixture
def execute(run_beside, tmp_path):
    """Execute a working copy of a notebook; raises if a cell fails that may not."""
    work = tmp_path / "work"
    copy = [sys.executable, "-m", "fsdp_helpers.cli.lab.working_copies", work]
    subprocess.run(copy, cwd=PROJECT, check=True, stdout=subprocess.PIPE)

    def run(name: str, variables: dict[str, str]) -> None:
        program = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
        settings = {"IPYTHONDIR": str(tmp_path / "ipython"), "PET_LOG_DIR": "/dev/null"}
        run_beside([*program, f"--ExecutePreprocessor.timeout={CELL_S}", work / f"{name}.ipynb"], settings | variables)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_beside_a_gpu(gpus, execute, name):
    execute(name, gpus.environment())
    assert gpus.touched() == []


@pytest.mark.parametrize("name", NAMES[:4])
def test_beside_a_gpu_that_torch_cannot_use(gpus, execute, name):
    execute(name, gpus.environment(too_old=True))
    assert gpus.touched() == []
