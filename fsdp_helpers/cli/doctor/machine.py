"""Checks of the machine: cores, memory, names and ports, data, leftovers of earlier runs, and two ranks that talk."""

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_helpers.cli.doctor.rows import Outcome, Unfit
from fsdp_helpers.quantities import GB, MB, format_bytes

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 64 * MB  # what a container gets unless it is told otherwise
LEAST_MEMORY_BYTES = 2 * GB
LARGEST_CHAPTER_BYTES = 7 * GB  # 04, with its 94 million parameters
ROUND_TRIP_S = 180.0
SERVER = ("multiprocessing.forkserver", "torch.distributed.fsdp")  # both are in our server's command line
RANK_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


def cores() -> Outcome:
    """Count the cores; one is enough, but slow."""
    from fsdp_helpers.ranks.group import num_cores

    count = num_cores()
    return Outcome(True, f"{count}" if count > 1 else "1: two ranks share it, so allow twice the stated times")


def memory() -> Outcome:
    """Compare free memory with what the notebooks take."""
    import psutil

    free = psutil.virtual_memory().available
    found = f"{format_bytes(free)} free"
    if free < LEAST_MEMORY_BYTES:
        return Outcome(False, f"{found}, two ranks want {format_bytes(LEAST_MEMORY_BYTES)}; close other programs")
    if free < LARGEST_CHAPTER_BYTES:
        return Outcome(True, f"{found}, enough for all but 04, which wants {format_bytes(LARGEST_CHAPTER_BYTES)}")
    return Outcome(True, found)


def shared_memory() -> Outcome:
    """Look for room in /dev/shm, where data loaders and NCCL exchange buffers."""
    if not SHARED_MEMORY.is_dir():
        raise Unfit(f"{SHARED_MEMORY} does not exist on this system")
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= LEAST_SHARED_BYTES:
        return Outcome(True, f"{format_bytes(free)} free in {SHARED_MEMORY}")
    remedy = (
        f"remove what ended programs left there (ls -l {SHARED_MEMORY}); in a container, start it with --shm-size=1g"
    )
    return Outcome(False, f"{SHARED_MEMORY} is full, {format_bytes(free)} free; {remedy}")


def host_name_resolves() -> Outcome:
    """Look the host's own name up, as gloo and torchrun do."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        remedy = f"add the line `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Outcome(False, f"{name} does not resolve ({error.strerror}); {remedy}")
    return Outcome(True, f"{name} is {address}")


def ports_answer() -> Outcome:
    """Take a free port on this machine and connect to it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "a firewall or sandbox blocks 127.0.0.1; torchrun and gloo need it"
        return Outcome(False, f"no connection to a port of this machine ({error}); {remedy}")
    return Outcome(True, "a free port of 127.0.0.1 answers")


def data_can_be_used() -> Outcome:
    """Check the checksums of MNIST's files or, if there are none, that they could be written; download nothing."""
    from fsdp_helpers.data.images import find_data_dir, offline
    from fsdp_helpers.data.mnist import MNIST_FILES, DataError, mnist_is_there, packed_files

    if offline():
        return Outcome(True, "the bundled digits, because FSDP_OFFLINE is set")
    folder = find_data_dir()
    try:
        if mnist_is_there(folder, checksums=True):
            return Outcome(True, "MNIST is there, and whole")
        is_packed = len(packed_files(folder)) == len(MNIST_FILES)
    except DataError as error:
        return Outcome(False, str(error))
    if problem := why_not_writable(folder):
        remedy = "make it writable, set FSDP_DATA_DIR to a different one, or FSDP_OFFLINE=1 for the bundled digits"
        where = "is packed" if is_packed else "is not"
        return Outcome(False, f"MNIST {where} in {folder}, and that folder cannot be written ({problem}); {remedy}")
    if is_packed:
        return Outcome(True, "MNIST is there, packed and whole: the first run unpacks it")
    return Outcome(True, "no MNIST yet: the first run downloads it, and without a network takes the bundled digits")


def why_not_writable(folder: Path) -> str:
    """Return why a file cannot be written to `folder`, or ""; a missing folder is not made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return error.strerror
    return ""


def nothing_left_over() -> Outcome:
    """Look for fork servers and ranks whose notebook or torchrun has ended."""
    left = list(orphans())
    if not left:
        return Outcome(True, "no process of an earlier run")
    pids = " ".join(str(pid) for pid, _ in left)
    what = ", ".join(f"{name} {pid}" for pid, name in left)
    return Outcome(False, f"{what}: the program that started it has ended; kill {pids}")


def orphans() -> Iterator[tuple[int, str]]:
    """Yield the number and kind of each process that an earlier run left behind."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or belongs to somebody else
            command = " ".join(process.cmdline())
            is_server = all(word in command for word in SERVER)
            if (is_server or belongs_to_rank(process)) and is_orphan(process):
                yield process.pid, "fork server" if is_server else "rank of torchrun"


def is_orphan(process: Any) -> bool:
    """Return True if the process has lost its parent: its parent is the first process, or one that is not Python.

    A rank's parent may also be a script that torchrun started in its stead; then the script's parent decides.
    """
    parent = process.parent()
    if parent is None or parent.pid == 1:
        return True
    if belongs_to_rank(parent):
        return is_orphan(parent)
    return "python" not in " ".join(parent.cmdline()[:1])


def belongs_to_rank(process: Any) -> bool:
    """Return True if torchrun started this process, or one above it."""
    import psutil

    try:
        return RANK_OF_TORCHRUN in process.environ()
    except psutil.AccessDenied:  # somebody else's
        return False


def gpu_is_usable_or_absent() -> Outcome:
    """Ask a child whether torch can compute on the first GPU."""
    from fsdp_helpers.ranks.gpus import VISIBLE, are_hidden, find_gpus

    if are_hidden():
        raise Unfit(f"{VISIBLE} hides all GPUs; ranks run on the CPU")
    gpus = find_gpus(1)
    if gpus.problem:
        remedy = f"update the driver, or torch to one that fits it; until then {VISIBLE}= hides it"
        return Outcome(False, f"torch cannot use the GPU of this machine ({gpus.problem}); {remedy}")
    return Outcome(True, f"{gpus.count} that torch can use" if gpus.count else "none: ranks run on the CPU")


def two_ranks_add_up() -> Outcome:
    """Start two ranks that exchange a sum, a gather and a scatter, as every notebook does."""
    from fsdp_helpers.cli.doctor.gpu_workers import collectives_on_device
    from fsdp_helpers.ranks.launching.launch import launch

    began_s = time.monotonic()
    found = launch(collectives_on_device, world_size=2, device="cpu", timeout_s=ROUND_TRIP_S, progress=False)
    right = [("cpu", 3.0, [1.0, 2.0], [2.0 * (rank + 1)]) for rank in range(2)]
    if found != right:
        return Outcome(False, f"they found {found}, not {right}; run again, then open an issue with this line")
    return Outcome(True, f"they talk through gloo; {time.monotonic() - began_s:.1f} s, most of it for loading PyTorch")
