"""Check the machine: cores, memory, files, data and GPU."""

import os
import shutil
import tempfile
from pathlib import Path

from fsdp_helpers.cli.doctor.rows import Outcome, Unfit, note
from fsdp_helpers.quantities import GB, MB, format_bytes

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 8 * MB  # a batch of 16 images of 224 x 224 pixels takes 10 MB
DOCKERS_SHARED_BYTES = 64 * 2**20  # a container's default
LARGER_SHARED = "start the container with --shm-size=1g or --ipc=host"
LEAST_FILES, ENOUGH_FILES = 64, 1024
LEAST_MEMORY_BYTES = 2 * GB
LARGEST_CHAPTER_BYTES = 7 * GB  # 04, with its 94 million parameters


def cores() -> Outcome:
    """Count the cores. One core is enough, but runs are slow on it."""
    from fsdp_helpers.ranks.group import num_cores

    count = num_cores()
    if count > 1:
        return Outcome(True, f"{count}")
    return note("1: two ranks share it, so expect twice the stated times")


def memory() -> Outcome:
    """Compare the free memory with what the notebooks need."""
    import psutil

    free = psutil.virtual_memory().available
    found = f"{format_bytes(free)} free"
    if free < LEAST_MEMORY_BYTES:
        return Outcome(False, f"{found}, but two ranks need {format_bytes(LEAST_MEMORY_BYTES)}; close other programs")
    if free < LARGEST_CHAPTER_BYTES:
        return note(f"{found}, enough for all notebooks except 04, which needs {format_bytes(LARGEST_CHAPTER_BYTES)}")
    return Outcome(True, found)


def shared_memory() -> Outcome:
    """Check for free space in /dev/shm, through which data loaders and NCCL exchange buffers."""
    if not SHARED_MEMORY.is_dir():
        raise Unfit(f"{SHARED_MEMORY} doesn't exist on this system")
    room = shutil.disk_usage(SHARED_MEMORY)
    found = f"{format_bytes(room.free)} of {format_bytes(room.total)} free in {SHARED_MEMORY}"
    if room.free < LEAST_SHARED_BYTES:
        remedy = f"remove files that dead programs left there (ls -l {SHARED_MEMORY})"
        return Outcome(False, f"{found}, too little for a data loader's batch; {remedy}, or {LARGER_SHARED}")
    if room.total <= DOCKERS_SHARED_BYTES:
        return note(f"{found}, Docker's default; data loaders with workers and NCCL may run out: {LARGER_SHARED}")
    return Outcome(True, found)


def open_files() -> Outcome:
    """Compare the limit on open files with the number that a launch and a data loader with workers need."""
    try:
        import resource
    except ImportError:
        raise Unfit("this system has no such limit") from None
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Outcome(True, "no limit")
    remedy = f"`ulimit -n {4096 if most == resource.RLIM_INFINITY else min(4096, most)}` in this shell"
    if most == limit:
        remedy = (
            "a shell can't raise it: set `nofile` in /etc/security/limits.conf, or start the container with "
            "--ulimit nofile=4096"
        )
    if limit < LEAST_FILES:
        return Outcome(False, f"at most {limit}, but two ranks need {LEAST_FILES}; {remedy}")
    if limit < ENOUGH_FILES:
        return note(f"at most {limit}; data loaders with workers may run out (Too many open files): {remedy}")
    return Outcome(True, f"at most {limit}")


def temporary_folder() -> Outcome:
    """Check that temporary files can be written, and that they go to the folder in TMPDIR, TEMP or TMP."""
    chosen = {name: os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)}
    for name, folder in chosen.items():
        problem = why_not_writable(Path(folder)) if Path(folder).is_dir() else "there's no such folder"
        if problem and usable_temporary_folder():
            return note(f"{name}={folder} can't be used ({problem}): Python uses {usable_temporary_folder()} instead")
    if not usable_temporary_folder():
        return Outcome(False, "no folder for temporary files is writable; set TMPDIR to one that is")
    return Outcome(True, usable_temporary_folder())


def usable_temporary_folder() -> str:
    """Return the folder that Python uses for temporary files, or ""."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return ""


def data_can_be_used() -> Outcome:
    """Verify the MNIST checksums or, if MNIST's files are missing, check that they can be written; download nothing."""
    from fsdp_helpers.data.source import MNIST_FILES, DataError, find_data_dir, mnist_is_there, offline, packed_files

    if offline():
        return Outcome(True, "the bundled digits, because FSDP_OFFLINE is set")
    folder = find_data_dir()
    try:
        if mnist_is_there(folder, checksums=True):
            return Outcome(True, "MNIST is there and complete")
        is_packed = len(packed_files(folder)) == len(MNIST_FILES)
    except DataError as error:
        return Outcome(False, str(error))
    if problem := why_not_writable(folder):
        remedy = "make it writable, choose another with FSDP_DATA_DIR, or use the bundled digits with FSDP_OFFLINE=1"
        where = "is compressed in" if is_packed else "isn't in"
        return Outcome(False, f"MNIST {where} {folder}, and that folder isn't writable ({problem}); {remedy}")
    if is_packed:
        return Outcome(True, "MNIST is there, complete but still compressed: the first run unpacks it")
    return Outcome(True, "no MNIST yet: the first run downloads it or, without a network, uses the bundled digits")


def why_not_writable(folder: Path) -> str:
    """Return why `folder` isn't writable, or ""; a missing folder isn't created."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return error.strerror
    return ""


def gpu_is_usable_or_absent() -> Outcome:
    """Find out, in a child process, whether torch can compute on the first GPU."""
    from fsdp_helpers.gpus import VISIBLE, are_hidden, find_gpus

    if are_hidden():
        raise Unfit(f"{VISIBLE} hides all GPUs; ranks run on the CPU")
    gpus = find_gpus(1)
    if gpus.problem:
        remedy = f"update the driver, or install a torch version that matches it; until then, {VISIBLE}= hides it"
        return Outcome(False, f"torch can't use this machine's GPU ({gpus.problem}); {remedy}")
    return Outcome(True, f"{gpus.count} that torch can use" if gpus.count else "none: ranks run on the CPU")
