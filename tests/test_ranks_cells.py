"""ruff reads no cell that begins with a magic that it does not know: here it reads the bodies of `%%ranks` cells."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import PROJECT

RUFF = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
NAMES = ["rank", "world_size", "device"]  # that a rank has from the beginning
NOTEBOOKS = sorted(PROJECT.glob("notebooks/*.ipynb"))
pytestmark = pytest.mark.skipif(RUFF is None, reason="ruff is not installed here")


def bodies(notebook: dict) -> dict:
    """The notebook's `%%ranks` cells alone, each without its first line, at the same line numbers."""
    cells = []
    for cell in notebook["cells"]:
        first, *rest = "".join(cell["source"]).splitlines(keepends=True) or [""]
        if cell["cell_type"] == "code" and re.fullmatch(r"%%ranks\b.*\s*", first):
            cells.append({**cell, "source": ["# on ranks\n", *rest], "outputs": []})
    return {**notebook, "cells": cells}


def complaints(notebook: dict, name: str, folder: Path) -> str:
    path = folder / name
    path.write_text(json.dumps(bodies(notebook)))
    code = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    # A setting or a function of the notebook that it gives to the ranks.
    handed_over = re.findall(r'ranks\.run\(f"(\w+) = |ranks\.run\(inspect\.getsource\((\w+)\)', code)
    handed_over = ["".join(names) for names in handed_over]
    names = [*NAMES, *handed_over]
    settings = ["--no-cache", "--config", str(PROJECT / "pyproject.toml"), "--config", f"builtins = {names}"]
    # A class in a cell needs no docstring, since there is text around it; new ranks need their imports again.
    settings += ["--extend-ignore", "D101,F811"]
    command = [RUFF, "check", *settings, "--output-format", "concise", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_ruff_has_nothing_against_cells_that_run_on_ranks(path, tmp_path):
    assert "All checks passed" in complaints(json.loads(path.read_text()), path.name, tmp_path)


def test_ruff_sees_a_name_that_no_cell_of_the_ranks_defines(tmp_path):
    sources = ["import torch\n", "%%ranks\nx = (rank, world_size, device)\ny0 = torch.ones(1)\n", "%%ranks 0\nx, y\n"]
    notebook = json.loads(NOTEBOOKS[0].read_text())
    blank = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    notebook["cells"] = [{**blank, "id": f"cell-{i}", "source": source} for i, source in enumerate(sources)]
    found = complaints(notebook, "some.ipynb", tmp_path)
    assert "cell 1:3:6: F821 Undefined name `torch`" in found and "cell 2:2:4: F821 Undefined name `y`" in found
    assert "Found 2 errors" in found
