"""Open the notebooks in JupyterLab, using this environment in kernels and terminals: `python -m fsdp_helpers lab`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_helpers.cli.lab.working_copies import ORIGINALS, copy_missing, older_than_originals

HERE = Path(__file__).resolve().parent
PROJECT = ORIGINALS.parent
FIRST = "00_start_here.ipynb"


def open_lab(copies: Path | None, arguments: Sequence[str]) -> None:
    """Start JupyterLab with copies of the notebooks in the folder `copies`, or with the originals if it's None.

    Returns when it exits. Raises ValueError if there are no notebooks, since a wheel has none, or if `copies` is outside
    the project, which is the folder that JupyterLab shows.
    """
    if not ORIGINALS.is_dir():
        raise ValueError("lab: the package was installed without the notebooks; clone the project, and run it there")
    folder = _folder_of(copies)
    if copies is not None:
        copied = copy_missing(PROJECT / folder)
        print(f"{folder}: files copied: {len(copied)}; copies that were there already are unchanged")
        for name in older_than_originals(PROJECT / folder):
            print(
                f"{folder / name} is older than the original: `make reset NOTEBOOK={name[:2]}` makes a new copy and "
                "keeps yours"
            )
        sign([path for path in copied if path.suffix == ".ipynb"])
    os.environ |= environment(os.environ)
    from jupyterlab.labapp import LabApp  # reads the environment when it's imported

    LabApp.launch_instance([*settings(folder), *arguments])


def sign(notebooks: Sequence[Path]) -> None:
    """Sign notebooks as if they had been run here: otherwise, JupyterLab sanitizes their saved outputs.

    Signatures are stored in Jupyter's data folder. If that folder isn't writable, print that signatures are missing.
    """
    if not notebooks:
        return
    command = [sys.executable, "-m", "nbformat.sign", *map(str, notebooks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the copies aren't signed: {done.stderr.strip().splitlines()[-1]}")


def environment(current: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that kernels and terminals need in addition to the `current` ones."""
    variables = {
        "JUPYTER_CONFIG_PATH": _joined(HERE / "config", current.get("JUPYTER_CONFIG_PATH")),
        "OMP_WAIT_POLICY": "PASSIVE",  # if cores are busy, spinning threads make a step take ten times as long
        "PET_LOG_DIR": os.devnull,  # otherwise, every torchrun leaves a folder with output that the cell shows anyway
    }
    if sys.prefix != sys.base_prefix:  # so that this environment's python comes first, in terminals as well
        variables["VIRTUAL_ENV"] = sys.prefix
        variables["PATH"] = _joined(Path(sys.executable).parent, current.get("PATH"))
    return variables


def settings(folder: Path) -> list[str]:
    """Return JupyterLab's arguments: the folder it shows, the file it opens first, and the shell for its terminals."""
    chosen = [f"--ServerApp.root_dir={PROJECT}", f"--LabApp.default_url=/lab/tree/{folder.as_posix()}/{FIRST}"]
    if shutil.which("sh"):
        chosen.append(f"--ServerApp.terminado_settings=shell_command={['sh', str(HERE / 'shell')]}")
    if hasattr(os, "getuid") and os.getuid() == 0:
        chosen.append("--allow-root")  # for example in a container; otherwise, JupyterLab refuses to run as root
    return chosen


def _folder_of(copies: Path | None) -> Path:
    """Return the folder to open, relative to the project."""
    if copies is None:
        return ORIGINALS.relative_to(PROJECT)
    whole = copies.resolve()
    if not whole.is_relative_to(PROJECT) or whole in (PROJECT, ORIGINALS):
        raise ValueError(f"--copies {copies}: choose a separate folder inside {PROJECT}, such as work")
    return whole.relative_to(PROJECT)


def _joined(first: Path, others: str | None) -> str:
    return os.pathsep.join([str(first), *([others] if others else [])])
