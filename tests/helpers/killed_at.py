"""Kills and full disks at a named moment of a run under torchrun: the moment at which a rank touches a certain file.

Each rank watches its own use of files through Python's audit events; no clock decides, so each kill lands, and leaves
a mark that says so. Ranks import this before anything else, so it imports next to nothing.
"""

import builtins
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
WHEN, MARK = "KILLED_AT", "KILLED_MARK"
STEP = "^print step "
STALE = "^shutil.rmtree .*unfinished"  # what a killed save left
WRITE = "^open .*unfinished.*/__0_0.distcp w"
METADATA = "^open .*unfinished.*/.metadata.tmp w"  # when all ranks have written
NAME = "^os.rename .*unfinished.* .*/step-"
BEGIN = "^os.mkdir .*unfinished-model"
SHARD = "^open .*unfinished-model/sharded/shard-00001.* w"
JOIN = "^open .*unfinished-model/model-00001-of-.* w"
JOINED = "^shutil.rmtree .*unfinished-model/sharded"
COPY = "^shutil.copyfile .*unfinished-model/"
EXPORT = "^os.rename .*unfinished-model .*/model"
# The N-th event of a kind, and who is killed: the rank that comes to it, its sibling, or torchrun. Of 10 steps, the
# 4th, the 8th and the last are saved; a run that was killed goes on after the last one that has its name.
KILLS = {
    "on 2 ranks": [
        (STEP, 3, "self"), (METADATA, 1, "torchrun"), (NAME, 1, "sibling"), (STEP, 6, "torchrun"), (WRITE, 1, "self"),
        (STEP, 2, "sibling"), (NAME, 1, "self"), (BEGIN, 1, "torchrun"), (JOIN, 1, "self"), (EXPORT, 1, "sibling"),
    ],
    "on 1 to 3 ranks": [
        (STEP, 3, "torchrun"), (WRITE, 1, "sibling"), (STALE, 1, "self"), (METADATA, 1, "self"), (NAME, 2, "sibling"),
        (STEP, 1, "self"), (SHARD, 1, "torchrun"), (JOINED, 1, "self"), (COPY, 1, "torchrun"), (EXPORT, 1, "sibling"),
    ],
}  # fmt: skip
# Of checkpoint.py, which saves after 5, 10 and 12 steps, and then removes the older checkpoint
NUMBER, OLDER = "^os.rename .*unfinished.* .*/0", "^shutil.rmtree .*/run/0"
SAVES = {
    "in saves of checkpoint.py": [
        (STEP, 3, "self"), (METADATA, 1, "torchrun"), (NUMBER, 1, "sibling"), (WRITE, 1, "self"), (STALE, 1, "sibling"),
        (OLDER, 1, "self"), (METADATA, 1, "sibling"), (NUMBER, 1, "self"),
    ],
}  # fmt: skip
WORLD_SIZES = {  # one start after the other; a sibling needs two ranks
    "in saves of checkpoint.py": (2,) * 9,
    "on 2 ranks": (2,) * 11,
    "on 1 to 3 ranks": (2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3),
}
Start = Callable[[int, str, dict[str, str]], AbstractContextManager]


def survive(start: Start, when: str, folder: Path) -> None:
    """Start a run again and again, each time killed at the next moment of `when`, and once more until its end.

    `start(world_size, name, variables)` is a torchrun_job.
    """
    moments = [*(KILLS | SAVES)[when], None]
    for number, (moment, world_size) in enumerate(zip(moments, WORLD_SIZES[when], strict=True)):
        name = f"job-{number}"
        with start(world_size, name, variables(folder, moment, name) if moment else {}) as job:
            status = job.wait()
            assert (status == 0) is (moment is None), f"{moment}: {job.output}"
            assert moment is None or (folder / f"{name}.landed").exists(), f"{moment} never came: {job.output}"


def variables(folder: Path, moment: tuple[str, int, str], name: str = "job") -> dict[str, str]:
    """Environment variables for a job. The victim may be `disk`: full at this moment, and at all others of its kind."""
    hooks = folder / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "sitecustomize.py").write_text("import killed_at; killed_at.watch()\n")
    pattern, number, victim = moment
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (hooks, HELPERS, HELPERS.parents[1]))),
        WHEN: f"{number}:{victim}:{pattern}",
        MARK: str(folder / f"{name}.landed"),
    }


def watch() -> None:
    """In a rank, before its program begins: look at each event."""
    if "RANK" not in os.environ or WHEN not in os.environ:
        return
    number, victim, pattern = os.environ[WHEN].split(":", 2)
    wanted, left, say = re.compile(pattern), int(number), builtins.print

    def look(event: str, arguments: tuple) -> None:
        nonlocal left
        if not event.startswith(("open", "os.", "shutil.", "print")):
            return
        if not wanted.search(" ".join(map(str, (event, *arguments[:3])))):
            return
        left -= 1
        if left == 0:
            strike(victim)
        if left <= 0 and victim == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    def print_seen(*values, **settings) -> None:
        look("print", values)
        say(*values, **settings)

    builtins.print = print_seen
    sys.addaudithook(look)


def strike(victim: str) -> None:
    try:
        Path(os.environ[MARK]).touch(exist_ok=False)
    except FileExistsError:  # another rank came to such a moment before
        return
    if victim == "self":
        os.kill(os.getpid(), signal.SIGKILL)
    if victim == "sibling":
        os.kill(sibling(), signal.SIGKILL)  # and this rank goes on, as far as it comes
    if victim == "torchrun":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # this rank ends with it


def sibling() -> int:
    """The process id of another rank of this torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_rank = b"\0RANK=" in (folder / "environ").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if parent == os.getppid() and is_rank and int(folder.name) != os.getpid():
            return int(folder.name)
    raise ProcessLookupError("a sibling needs two ranks")
