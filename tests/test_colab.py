"""docs/colab.ipynb where Colab and Kaggle begin: a Python that has torch and a kernel, and nothing else of the series."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from leftovers import PROJECT

COLAB = PROJECT / "docs" / "colab.ipynb"
BRINGS = ("torch", "ipykernel", "pip", "nbformat", "ipywidgets")  # what such a machine has, of what's needed


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """These packages and all that they need here."""
    found, left = set(), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", left.pop())[0]).lower()
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # not on this system
            continue
        found.add(name)
        left += [need for need in needs if "extra ==" not in need]
    return found


def environment_with_torch_alone(folder: Path) -> Path:
    """A virtual environment that sees some of this one's packages; its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    packages = folder / "packages"
    packages.mkdir()
    for name in with_dependencies(BRINGS) - {"pip"}:
        parts = {file.parts[0]: file.locate().parents[len(file.parts) - 1] for file in distribution(name).files}
        for part, root in parts.items():
            if part not in ("..", "__pycache__") and not (packages / part).exists():
                (packages / part).symlink_to(root / part)
    (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (site / "torch.pth").write_text(f"{packages}\n")
    return folder / "venv" / "bin" / "python"


@pytest.mark.long
def test_it_installs_what_is_missing_and_runs_00_and_03(tmp_path, monkeypatch):
    index = [sys.executable, "-m", "pip", "--retries", "1", "--timeout", "10", "index", "versions", "safetensors"]
    if subprocess.run(index, capture_output=True, check=False).returncode:
        pytest.skip("no package index is at hand")
    python = environment_with_torch_alone(tmp_path)
    missing = subprocess.run([python, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    assert "No module named 'torchvision'" in missing.stderr
    kernel = tmp_path / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "torch alone", "language": "python"}))
    notebook = tmp_path / "colab.ipynb"
    local = COLAB.read_text().replace('ADDRESS = \\"\\"', f'ADDRESS = \\"{PROJECT}\\"')
    assert str(PROJECT) in local
    notebook.write_text(local)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    for name in ("PYTHONPATH", "FSDP_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbmake",
        "--nbmake-kernel=colab",
        "--overwrite",
    ]
    done = subprocess.run(
        [*command, notebook], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    printed = "".join(
        "".join(output.get("text", ""))
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", [])
    )
    assert "missing: torchvision>=" in printed and "\ntorch 2" in printed
    assert "1 of 18 wrong: Jupyter. " in printed and "ok    two ranks" in printed, "the machine has a page of its own"
    assert (tmp_path / "fsdp" / "notebooks" / "03_fsdp.ipynb").exists()
