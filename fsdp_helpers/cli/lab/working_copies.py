"""Working copies of the notebooks, so that running them and solving exercises doesn't change the project's files.

python -m fsdp_helpers.cli.lab.working_copies work              # copies missing files
python -m fsdp_helpers.cli.lab.working_copies work --reset 3    # makes a new copy of 03; the old copy stays next to it
"""

import argparse
import shutil
from pathlib import Path

ORIGINALS = Path(__file__).resolve().parents[3] / "notebooks"
IF_IT_IS_OPEN = (
    "if it's open in JupyterLab, choose File > Reload Notebook from Disk; if JupyterLab says that the file has changed "
    "on disk, choose Revert"
)
# Files left behind by working in the originals; they aren't copied.
LEFT_OUT = shutil.ignore_patterns("my_*", "job.sbatch", ".*", "__pycache__")


def copy_missing(work: Path) -> list[Path]:
    """Copy the notebooks and the files they read into `work`, skipping existing files; return the new files."""
    copied = []

    def copy(original: str, to: str) -> None:
        if not Path(to).exists():
            copied.append(Path(shutil.copy2(original, to)))

    shutil.copytree(ORIGINALS, work, copy_function=copy, ignore=LEFT_OUT, dirs_exist_ok=True)
    return copied


def older_than_originals(work: Path) -> list[str]:
    """Return the names of the notebooks in `work` whose originals have changed since they were copied there."""
    return [
        original.name
        for original in sorted(ORIGINALS.glob("[0-9][0-9]_*.ipynb"))
        if (copy := work / original.name).exists() and copy.stat().st_mtime < original.stat().st_mtime
    ]


def reset(work: Path, number: str) -> Path:
    """Restore the notebook with this number; keep the old copy as `..._before.ipynb`. Return the notebook's path."""
    found = sorted(ORIGINALS.glob(f"{number.zfill(2)}_*.ipynb")) if number else []
    if not found:
        raise SystemExit(f"there's no notebook {number!r}; give a notebook's number, such as 3")
    copy = work / found[0].name
    if copy.exists():
        copy.replace(free_name(copy))
    shutil.copy2(found[0], copy)
    return copy


def free_name(copy: Path) -> Path:
    """Return 03_fsdp_before.ipynb or, if that's taken, 03_fsdp_before_2.ipynb, and so on."""
    names = (copy.with_stem(f"{copy.stem}_before{f'_{number}' * (number > 1)}") for number in range(1, 10_000))
    return next(name for name in names if not name.exists())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make copies of the notebooks to work in.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--reset", metavar="NN")
    options = parser.parse_args()
    num_copied = len(copy_missing(options.work))
    print(f"{options.work}: files copied: {num_copied}; copies that were there already are unchanged")
    if options.reset is not None:
        print(f"{reset(options.work, options.reset)} has been reset to the original")
        print(IF_IT_IS_OPEN)


if __name__ == "__main__":
    main()
