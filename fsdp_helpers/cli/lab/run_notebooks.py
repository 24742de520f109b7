"""Execute notebooks one after another, from top to bottom, and save their outputs: `make run NOTEBOOKS="03 09"`.

A notebook is saved only if its run completes.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

FOLDER = Path(__file__).resolve().parents[3] / "notebooks"
CELL_S = 600  # for one cell, on a busy machine


def notebooks_named(names: list[str]) -> list[Path]:
    """Return the notebooks whose names start with any of `names` (default: all); each name must match at least one."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    for name in names:
        if not any(path.name.startswith(name) for path in paths):
            raise SystemExit(f"there's no notebook {name!r}; choose from {', '.join(path.stem for path in paths)}")
    return [path for path in paths if not names or path.name.startswith(tuple(names))]


def run(path: Path) -> None:
    """Execute a notebook in its folder and write it back."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # execution times, which change with every run
    NotebookClient(
        notebook, timeout=CELL_S, record_timing=False, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    nbformat.write(notebook, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="first characters of the notebooks' names, such as 03 (default: all)")
    for path in notebooks_named(parser.parse_args().names):
        start_s = time.monotonic()
        try:
            run(path)
        except (CellExecutionError, CellTimeoutError) as error:
            print(f"{path.name} is unchanged: {error}", file=sys.stderr)
            return 1
        print(f"{path.name}  {time.monotonic() - start_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
