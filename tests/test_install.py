"""What `make lab` installs, and what it says meanwhile: docs/install.py."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
from leftovers import PROJECT

with patch("sys.path", [str(PROJECT / "docs"), *sys.path]):
    import install

LOCK = PROJECT / "requirements.lock"
UV = Path(sys.executable).with_name("uv")
CUDA = re.compile(r"nvidia|cuda|triton|nccl|-cu\d\d")


def needed_by(lock: str) -> dict[str, set[str]]:
    """Each requirement of a lock, as written there, and what needs it."""
    found = {}
    for line in lock.splitlines():
        if re.match(r"\w", line):
            found[line] = needing = set()
        elif one := re.match(r" +# +(?:via )?([\w.-]+)", line):
            needing.add(one[1])
    return found


def test_the_cpu_build_comes_without_what_only_the_cuda_build_needs_and_the_rest_is_the_locks():
    lock = LOCK.read_text()
    everything, chosen = install.packages(lock, ""), install.packages(lock, "cpu")
    left_out = [line for line in everything if line not in chosen]
    assert [line for line in chosen if line in everything] == chosen and len(left_out) > 10
    assert not any(CUDA.search(line.partition("=")[0]) for line in chosen)
    for line, needing in needed_by(lock).items():
        names = {one.partition("==")[0] for one in left_out}
        only_for_torch_on_linux = needing - {"via"} <= {"torch"} | names and "sys_platform == 'linux'" in line
        assert (line in left_out) == only_for_torch_on_linux, line


@pytest.mark.parametrize(
    ("torch", "uv", "made"),
    [
        (
            "",
            "",
            ["-m venv .venv", ".venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --req"],
        ),
        ("", "/bin/uv", ["-m venv .venv", "/bin/uv pip install --python .venv/bin/python --requirement"]),
        (
            "cpu",
            "/bin/uv",
            ["-m venv .venv", "/bin/uv pip install --python .venv/bin/python --torch-backend cpu --req"],
        ),
        (
            "cpu",
            "",
            ["-m venv .venv", "--progress-bar off uv==", ".venv/bin/uv pip install --python"],
        ),
    ],
)
def test_each_way_makes_its_commands_and_says_packages_size_and_minutes(torch, uv, made):
    make = [
        "make",
        "--dry-run",
        "--always-make",
        ".venv/installed",
        f"TORCH={torch}",
        f"UV={uv}",
        f"PYTHON={sys.executable}",
    ]
    planned = subprocess.run(make, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in planned.splitlines() if "docs/install.py" in line]
    command = [*shlex.split(line), "--dry-run"]
    said = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    commands, last = re.findall(r"^  (.+)$", said, re.MULTILINE), r" --no-deps --no-build-isolation --editable \.$"
    assert len(commands) == len(made) + 1 and re.search(last, commands[-1])
    assert all(part in command for part, command in zip(made, commands, strict=False)), commands
    assert re.search(
        rf"\d{{3}} packages, as in requirements.lock, by {'uv' if uv or torch else 'pip'}; . GB.* minutes\n", said
    )


def test_the_list_for_the_cpu_build_is_what_is_installed_here(tmp_path):
    """A dry run, without an index: nothing would change, so uv reads the list, and its versions are the lock's."""
    if not UV.exists() or f"\ntorch=={version('torch').partition('+')[0]}\n" not in LOCK.read_text():
        pytest.skip("this environment isn't the lock's")
    (tmp_path / "packages.txt").write_text("\n".join(install.packages(LOCK.read_text(), "cpu")))
    *_, (_, command), _ = install.steps(Path(sys.prefix), LOCK, "cpu", str(UV))
    command = [*map(str, command[:-1]), tmp_path / "packages.txt", "--dry-run", "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Would make no changes" in done.stderr, done.stderr


def test_a_long_step_says_where_it_is_and_a_failed_one_why(tmp_path, capsys, monkeypatch):
    assert install.EVERY_S < 10
    monkeypatch.setattr(install, "EVERY_S", 0.2)
    code = "import time, sys; print('Downloading torch (900 MB)'); time.sleep({}); sys.exit({})"
    assert install.run([sys.executable, "-c", code.format(2, 0)], tmp_path / "log", 0.0)
    assert capsys.readouterr().out.count(" MB  Downloading torch (900 MB)\n") >= 1
    assert not install.run([sys.executable, "-c", code.format(0, 3)], tmp_path / "log", 0.0)
    assert capsys.readouterr().err.endswith("\nDownloading torch (900 MB)\n")
