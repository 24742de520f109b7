"""Install the project into a virtual environment, and say what happens: `make lab` and others run this first.

python3 docs/install.py .venv requirements.lock
python3 docs/install.py .venv requirements.lock --torch cpu    # PyTorch's CPU build, which uv knows where to find
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

EVERY_S = 5.0  # a line at least this often
ASIDES = (
    "WARNING",
    "Attempting uninstall",
    "Found existing",
    "Uninstalling",
    "Successfully uninstalled",
)  # in pip's output
LAST_LINES = 12  # of the output of a step that failed
SIZES = {"": "7 GB, most of it PyTorch with its CUDA libraries", "cpu": "2 GB, most of it PyTorch's CPU build"}
MINUTES = {True: "a few minutes", False: "4 to 8 minutes"}  # with uv, and with pip on a fast network
ONLY_CUDA = re.compile(r"(nvidia-|cuda-|triton==)")  # packages that only PyTorch's CUDA build needs


def packages(lock: str, torch: str) -> list[str]:
    """Return a lock's requirements, one per line; for the CPU build without those that only the CUDA build needs."""
    lines = [line for line in lock.splitlines() if re.match(r"\w", line)]
    return [line for line in lines if not (torch == "cpu" and ONLY_CUDA.match(line))]


def steps(venv: Path, lock: Path, torch: str, uv: str) -> list[tuple[str, list]]:
    """Return what each step does, and its command; `uv` is the path of the uv to use, or "" for pip."""
    python, chosen = venv / "bin" / "python", packages(lock.read_text(), torch)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    made = [
        (f"{venv}: a virtual environment with Python {sys.version.split()[0]}", [sys.executable, "-m", "venv", venv])
    ]
    if torch == "cpu" and not uv:
        (pinned,) = [line for line in chosen if line.startswith("uv==")]
        made.append((f"{pinned}, which knows where PyTorch's CPU build is", [*pip, pinned]))
        uv = str(venv / "bin" / "uv")
    install = [uv, "pip", "install", "--python", python] if uv else pip
    build = ["--torch-backend", torch] if torch else []
    size, minutes = SIZES[torch], MINUTES[bool(uv)]
    said = f"{len(chosen)} packages, as in {lock}, by {'uv' if uv else 'pip'}; {size}; {minutes}"
    made.append((said, [*install, *build, "--requirement", venv / "packages.txt"]))
    made.append(
        ("fsdp_helpers, this project's own package", [*install, "--no-deps", "--no-build-isolation", "--editable", "."])
    )
    return made


def run(command: list, log: Path, started_s: float) -> bool:
    """Run a command with its output in a file; show the output's last line every few seconds. Return False if it fails."""
    with log.open("w+") as output:
        variables = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=variables)
        while True:
            try:
                failed = process.wait(EVERY_S)
                break
            except subprocess.TimeoutExpired:
                said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
                now = [line for line in said if line and not line.startswith(ASIDES)] or ["starting"]
                print(
                    f"  {time.monotonic() - started_s:4.0f} s, {size_mb(log.parent):5.0f} MB  {now[-1][:90]}",
                    flush=True,
                )
    if failed:
        print(f"this command failed: {shlex.join(map(str, command))}", file=sys.stderr)
        print(*log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
        if Path(command[0]).name == "uv":
            print(
                "uv doesn't read pip's settings, such as a mirror's address; `make lab UV=` uses pip", file=sys.stderr
            )
    return not failed


def size_mb(folder: Path) -> float:
    """Return how much a folder holds on the disk, in MB of 10^6 bytes."""
    return 1.024e-3 * int(subprocess.run(["du", "-sk", folder], capture_output=True, text=True).stdout.split()[0])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--torch", choices=SIZES, default="", help="cpu: PyTorch's CPU build")
    parser.add_argument("--uv", default="", help="the uv to use, if there is one")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and their commands, and run nothing")
    chosen = parser.parse_args(arguments)
    started_s, made = time.monotonic(), steps(chosen.venv, chosen.lock, chosen.torch, chosen.uv)
    for number, (said, command) in enumerate(made, 1):
        print(f"step {number} of {len(made)}: {said}", flush=True)
        if chosen.dry_run:
            print(f"  {shlex.join(map(str, command))}")
            continue
        chosen.venv.mkdir(exist_ok=True)
        (chosen.venv / "packages.txt").write_text("\n".join(packages(chosen.lock.read_text(), chosen.torch)) + "\n")
        if not run(command, chosen.venv / "install.log", started_s):
            return 1
    if not chosen.dry_run:
        print(f"installed in {time.monotonic() - started_s:.0f} s; `make clean` removes {chosen.venv}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped; the next `make lab` starts again, from the packages that it has downloaded")
