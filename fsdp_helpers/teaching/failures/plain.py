"""Run a failure's broken function under plain torchrun, without our launcher, to get the output that every user sees.

torchrun --standalone --nproc-per-node 2 -m fsdp_helpers.teaching.failures.plain NAME SECONDS
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch.distributed as dist

from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.crashes_at_the_ends import SCRIPT
from fsdp_helpers.teaching.failures.gallery import LIMIT_S, NUM_RANKS, TEMPORARY

PATIENCE_S = 10  # the timeout of a collective, instead of half an hour
MODULE = "fsdp_helpers.teaching.failures.plain"
MOST_LINES, MOST_OF_LINE, LINES_OF_ERROR = 5, 260, 3
RANK = re.compile(r"^\[rank\d\]: ?")
ERROR = re.compile(
    r"^(\[rank\d\]: )?(?!\S*ChildFailedError)[A-Za-z_.]*(Error|Exception|Timeout|Unsupported)\b(: |:?$)"
    r"|^\[rank\d\]:\[E|what\(\):|terminate called"
)
SCRIPTS = {"crash-no-traceback": SCRIPT.replace("@record_or_not", "")}  # these fail before there's a process group
END_OF_ERROR = (
    "Traceback",
    "The above exception",
    "During handling",
    "Exception raised",
    "Tip:",
    "For example",
    "frame #",
)
# Text that differs from run to run or from machine to machine, and its replacement.
VARYING = (
    (r"\b\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d", "TIME"),
    (r"\[([EW])\d{4} [\d:.]+ ", r"[\1 "),
    (r"(host +: ).*", r"\1HOST"),
    (r"\(pid: \d+\)", "(pid: PID)"),
    (r"by PID \d+", "by PID PID"),
    (r"0x[0-9a-f]{6,}", "0xADDRESS"),
    (r"\x1b\[\d*m", ""),
    (r"127\.0\.0\.1|\[::1\]|localhost", "ADDRESS"),
    (r"(ADDRESS\]?[:, ]+)\d{4,5}\b", r"\1PORT"),
    (r"(port: )\d+", r"\1PORT"),
    (r"/\S*/([a-z_]+\.(cc|cpp|py))", r"\1"),
)


def run_plainly(name: str, patience_s: float = PATIENCE_S) -> dict:
    """Run a failure's broken function under torchrun; return the exit status, the lines that matter, and the report."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPTS.get(name, ""))
        worker = [str(script)] if name in SCRIPTS else ["-m", MODULE, name, str(patience_s)]
        command = [*torchrun, "--log-dir", folder, *worker]
        variables = os.environ | {"TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=variables)
    return what_matters(done.returncode, done.stderr)


def what_matters(status: int, printed: str) -> dict:
    """Return the parts of torchrun's output that a card shows, without anything that varies from run to run."""
    lines = [steady(line) for line in printed.splitlines()]
    first = list(islice(dict.fromkeys(errors_of(lines)), MOST_LINES))
    return {"status": status, "errors": first, "report": report_of(lines)}


def steady(line: str) -> str:
    """Return a line without anything that varies from run to run."""
    line = TEMPORARY.sub("FOLDER", line)
    for pattern, instead in VARYING:
        line = re.sub(pattern, instead, line)
    return line.rstrip()[:MOST_OF_LINE]


def errors_of(lines: list[str]) -> Iterator[str]:
    """Yield the last line of each traceback, any lines that continue a long message, and error lines from C++."""
    for number, line in enumerate(lines):
        if not ERROR.search(line):
            continue
        yield line
        for more in lines[number + 1 : number + LINES_OF_ERROR]:
            said = RANK.sub("", more).strip()
            if not RANK.match(more) or not said or ERROR.search(more) or said.startswith(END_OF_ERROR):
                break
            yield more


def report_of(lines: list[str]) -> list[str]:
    """Return torchrun's own report, from ChildFailedError to the end of the table."""
    begin = next((number for number, line in enumerate(lines) if "errors.ChildFailedError" in line), len(lines))
    return [line for line in lines[begin:] if line.strip() and not set(line) <= set("=-")]


def main(name: str, patience_s: str) -> None:
    """Run a failure's broken function as one of torchrun's ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(patience_s)))
    numbers = gallery.find(name).broken(dist.get_rank(), dist.get_world_size())
    print(f"rank {dist.get_rank()}: {numbers}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
