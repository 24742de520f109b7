"""Set up a laptop from the folder that `make offline` has prepared, with no network except the one that serves it.

python3 laptop.py http://ADDRESS:8000         # a machine that serves the folder
python3 laptop.py /path/to/the/stick/offline  # the folder itself

It needs Python 3.11 or newer, git and make, and nothing of this project: it comes with the folder.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

TARGET = Path("fsdp")


def fetch(address: str, to: Path) -> None:
    try:
        with urllib.request.urlopen(address, timeout=60) as response, open(to, "wb") as file:
            shutil.copyfileobj(response, file)
    except urllib.error.URLError as error:
        raise SystemExit(f"{address} does not answer: {error.reason}") from None


def refuse_what_cannot_work(contents: dict) -> None:
    """Raise SystemExit with one line if this machine lacks a program or the packages are for a different kind."""
    missing = [name for name in ("git", "make") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} must be installed first")
    if TARGET.exists():
        raise SystemExit(f"{TARGET.resolve()} is there already; remove it, or start in a different folder")
    here = ".".join(platform.python_version_tuple()[:2]), sysconfig.get_platform()
    there = ".".join(contents["python"]), contents["platform"]
    if here != there:
        raise SystemExit(
            f"the packages are for Python {there[0]} on {there[1]}, this is Python {here[0]} on {here[1]}; "
            "start laptop.py with that Python, or prepare a folder on a machine like this one"
        )


def clone(address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "fsdp.bundle")
        fetch(f"{address}/fsdp.bundle", bundle)
        subprocess.run(["git", "-c", "advice.detachedHead=false", "clone", "--quiet", bundle, TARGET], check=True)
    git = ["git", "-C", str(TARGET)]
    subprocess.run([*git, "switch", "--quiet", "--create", "main"], check=True)  # a bundle names no branch
    subprocess.run([*git, "remote", "remove", "origin"], check=True)  # nor will it be there any more


def copy_data(address: str, names: list[str]) -> None:
    raw = TARGET / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in names:
        fetch(f"{address}/data/{name}", raw / name)


def install(address: str) -> None:
    """Install as `make lab` does, with pip held to the folder's packages."""
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{address}/packages/"}
    pip["PIP_TRUSTED_HOST"] = (
        urllib.parse.urlsplit(address).hostname or "localhost"
    )  # it is served without a certificate
    command = ["make", "--no-print-directory", ".venv/installed", f"PYTHON={sys.executable}"]
    subprocess.run(command, cwd=TARGET, env={**os.environ, **pip}, check=True)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 laptop.py http://ADDRESS:8000, or the path of the folder")
    given = sys.argv[1]
    address = (given if "://" in given else Path(given).resolve().as_uri()).rstrip("/")
    with tempfile.TemporaryDirectory() as folder:
        fetch(f"{address}/contents.json", Path(folder, "contents.json"))
        contents = json.loads(Path(folder, "contents.json").read_text())
    refuse_what_cannot_work(contents)
    clone(address)
    copy_data(address, contents["data"])
    install(address)
    print(f"ready: cd {TARGET}, then make lab; no network is needed")


if __name__ == "__main__":
    main()
