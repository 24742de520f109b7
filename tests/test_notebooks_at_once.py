"""Notebooks that a person leaves open, one after the other: all at once, in one folder, on a machine of 24 GiB."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
import psutil
import pytest
from leftovers import PROJECT
from nbclient import NotebookClient

from fsdp_helpers.data.source import offline
from fsdp_helpers.teaching.page.this_machine import private_bytes

NUMBERS = ("00", "01", "02", "03", "06", "07")
MEMORY_BYTES = 24 * 1024**3
OFFLINE = offline()  # asked for once: within a test nothing of it is seen
START_S, CELL_S = 600, 600  # six kernels share the cores: half a minute alone is more than three minutes here


@pytest.mark.long
@pytest.mark.timeout(6_000)
def test_all_finish_and_none_disturbs_another(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PET_LOG_DIR", "/dev/null")  # as `make lab` has it
    if OFFLINE:
        monkeypatch.setenv("FSDP_OFFLINE", "1")
    work = tmp_path / "work"
    subprocess.run([sys.executable, "-m", "fsdp_helpers.cli.lab.working_copies", work], cwd=PROJECT, check=True)
    notebooks = {number: read(work, number) for number in NUMBERS}
    highest_bytes = asyncio.run(run_together(list(notebooks.values()), work))
    print(f"at most {highest_bytes / 1e9:.1f} GB at once")
    assert {number: unexpected(notebook) for number, notebook in notebooks.items()} == dict.fromkeys(NUMBERS, [])
    assert highest_bytes < MEMORY_BYTES


def read(folder: Path, number: str) -> nbformat.NotebookNode:
    """A notebook without what was kept of its last run."""
    (path,) = folder.glob(f"{number}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    return notebook


def unexpected(notebook: nbformat.NotebookNode) -> list[str]:
    """Cells that did not run, and errors where a cell may have none."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [] if [cell.execution_count for cell in code] == list(range(1, len(code) + 1)) else ["not one whole run"]
    for cell in code:
        if "raises-exception" not in cell.metadata.get("tags", []):
            found += [output.evalue for output in cell.outputs if output.output_type == "error"]
    return found


async def run_together(notebooks: Sequence[nbformat.NotebookNode], folder: Path) -> int:
    """Run them side by side; the highest sum of the memory of all kernels with all that they have started."""
    place = {"metadata": {"path": str(folder)}}
    clients = [
        NotebookClient(notebook, resources=place, timeout=CELL_S, startup_timeout=START_S) for notebook in notebooks
    ]
    running = asyncio.gather(*(client.async_execute() for client in clients))
    highest_bytes = 0
    while not running.done():
        await asyncio.wait([running], timeout=1.0)
        held = [private_bytes(process) for process in psutil.Process().children(recursive=True)]
        highest_bytes = max(highest_bytes, sum(held))
    await running  # raises where a cell failed that may not
    return highest_bytes
