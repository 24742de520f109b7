"""One folder with everything that laptops without a network need: `make offline`.

It has the packages of requirements.lock as wheels, for machines like this one; the last commit; MNIST if it is here; and
laptop.py, which sets a laptop up from the folder or from a machine that serves it.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from fsdp_helpers.cli.lab.pages import PROJECT
from fsdp_helpers.data.mnist import MNIST_FILES

SCRIPT = Path(__file__).resolve().parent / "laptop.py"
MNIST = Path("MNIST", "raw")


def collect_packages(lock: Path, folder: Path) -> None:
    """Put a wheel of each package of the lock into `folder`; wheels that are there already stay."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--find-links", str(folder), "--requirement", str(lock), "--wheel-dir", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)


def bundle_repository(project: Path, bundle: Path) -> None:
    """Write the last commit, with its history, as one file that can be cloned."""
    subprocess.run(["git", "-C", project, "bundle", "create", "--quiet", bundle.resolve(), "HEAD"], check=True)


def copy_data(data: Path, folder: Path) -> list[str]:
    """Copy MNIST, packed or as a download leaves it; return the files' names, none if it is not here whole."""
    ways = ([data / MNIST / f"{name}{end}" for name in MNIST_FILES] for end in (".gz", ""))
    files = next((paths for paths in ways if all(path.exists() for path in paths)), [])
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy2(path, folder)).name for path in files]


def prepare(project: Path, folder: Path, data: Path) -> dict:
    """Fill the folder; return the content of contents.json, which laptop.py reads first."""
    collect_packages(project / "requirements.lock", folder / "packages")
    bundle_repository(project, folder / "fsdp.bundle")
    shutil.copy2(SCRIPT, folder)
    contents = {
        "python": platform.python_version_tuple()[:2],
        "platform": sysconfig.get_platform(),
        "data": copy_data(data, folder / "data"),
    }
    (folder / "contents.json").write_text(json.dumps(contents, indent=1) + "\n")
    return contents


def is_committed(project: Path) -> bool:
    done = subprocess.run(["git", "-C", project, "status", "--porcelain"], capture_output=True, text=True, check=True)
    return not done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--to", type=Path, default=PROJECT / "offline", metavar="DIR", help="folder to write to (default: offline/)"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=PROJECT / "data",
        metavar="DIR",
        help="folder that has MNIST/raw (default: data/)",
    )
    options = parser.parse_args()
    print(
        "about 3 GB of packages, most of it PyTorch with its CUDA libraries; those that are there already stay",
        flush=True,
    )
    contents = prepare(PROJECT, options.to, options.data_dir)
    size_gb = sum(path.stat().st_size for path in options.to.rglob("*") if path.is_file()) / 1e9
    python = ".".join(contents["python"])
    print(f"{options.to}: {size_gb:.1f} GB, for Python {python} on {contents['platform']}")
    print("data:", "MNIST" if contents["data"] else "no MNIST here, so laptops use the bundled digits")
    if not is_committed(PROJECT):
        print("the folder has the last commit: changes that are not committed are not in it")
    print(f"to serve it: python3 -m http.server --directory {options.to} 8000")


if __name__ == "__main__":
    main()
