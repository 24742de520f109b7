"""Watch scripts on the package's warm ranks, as `inspect` does under torchrun."""

import linecache
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_helpers.inspecting.report import findings
from fsdp_helpers.inspecting.run import watch_script
from fsdp_helpers.inspecting.watch import Record, Watch
from fsdp_helpers.ranks.errors import Answer, Failure
from fsdp_helpers.ranks.processes import Processes

FOLDER = Path(__file__).parents[2] / "notebooks" / "take_home"
TAKE_HOME = ("checkpoint.py", "ddp.py", "fsdp1.py", "fsdp2.py", "levers.py", "offload.py", "vit.py")
LIMIT_S, GRACE_S = 240.0, 5.0


def watch(name: str, code: str, arguments=(), num_ranks: int = 2) -> tuple[dict[str, str], list[Record], str]:
    """What is found in `code`, run as NAME on every rank; the ranks' records; and what they printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said: list[bytes] = []
    everyone = range(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        body = partial(run_watched, name, code, list(map(str, arguments)), folder, store.port)
        with Processes(body, num_ranks, "cpu", lambda rank, stream, data: said.append(data)) as ranks:
            ranks.collect(everyone, time.monotonic() + LIMIT_S, GRACE_S)
            records = [ranks.notes.get(rank, Record(end="didn't end")) for rank in everyone]
            ranks.end()
    return findings(records), records, b"".join(said).decode(errors="replace")


def run_watched(name, code, arguments, folder, port, rank, world_size, group, send, link) -> Answer:
    meeting_point = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(meeting_point, TMPDIR=folder)
    os.chdir(folder)
    tempfile.tempdir = folder
    torch.set_num_threads(1)  # as under torchrun
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    watching = Watch()
    status = watch_script(watching, name, arguments, code)
    send("note", watching.record)
    return Answer(0, failure=Failure(f"exit status {status}") if status else None)


def take_home(name: str, folder: Path) -> tuple[str, list[str]]:
    """A take-home script and its arguments, for a short run that writes into `folder`."""
    return (FOLDER / name).read_text(), {"checkpoint.py": [str(folder / "run"), "4"]}.get(name, [])
