"""A run's checkpoint folder, in which each checkpoint is written atomically. No torch import.

`DIR/step-00000020/` has one checkpoint's files and `checkpoint.json`, which describes them. The folder is written
under a temporary name and renamed once every byte is on disk, so a folder with the final name is complete, even if the
process was killed. The run that's writing holds a lock, which the system releases no matter how the process exits.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

FORMAT = 2  # increased whenever older versions of this package can't read new checkpoints
DESCRIPTION = "checkpoint.json"
UNFINISHED, REMOVED = ".writing-", ".removing-"  # may be left behind by a killed process; never read


class CheckpointError(Exception):
    """A checkpoint can't be written, found or read; the message gives the file and the fix."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of `checkpoint.json`: enough to refuse a wrong or damaged checkpoint before anything is loaded."""

    format: int
    step: int  # optimizer steps since the beginning of the run, from the folder's name; 0 if the name has none
    world_size: int
    settings: dict  # the settings that a resumed run must have in common with this one
    files: dict[str, int]  # every other file's name -> its size in bytes


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step number in a checkpoint's name, or 0 if there isn't one."""
    found = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(found[1]) if found else 0


def find_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in `folder`, oldest first; an empty list if the folder doesn't exist."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{8,})", name)))


def find_newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder`; None if there isn't one yet."""
    steps = find_steps(folder)
    return folder / checkpoint_name(steps[-1]) if steps else None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the description of the checkpoint at `path`, after checking the size of every file.

    Raises CheckpointError if a file is missing or truncated, or if `path` isn't a checkpoint or has a newer format.
    """
    try:
        content = json.loads((path / DESCRIPTION).read_text())
        written_format = content["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} isn't a checkpoint: it has no readable {DESCRIPTION}. Give a folder that "
            f"`train --checkpoint-dir` wrote, such as {checkpoint_name(20)}"
        ) from error
    if not isinstance(written_format, int) or written_format > FORMAT:
        raise CheckpointError(
            f"{path} has format {written_format}, but this version of fsdp_helpers can't read formats above {FORMAT}; "
            "update fsdp_helpers to load it"
        )
    try:
        checkpoint = Checkpoint(**content)
        for name, kind in {"step": int, "world_size": int, "settings": dict}.items():
            if not isinstance(getattr(checkpoint, name), kind):
                raise TypeError(f"{name} is {getattr(checkpoint, name)!r}")
        sizes = {str(name): int(size) for name, size in checkpoint.files.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / DESCRIPTION} is damaged: {error}. {_way_out(path)}") from error
    _check_files(path, sizes)
    return checkpoint


def _check_files(path: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing. {_way_out(path)}")
        if file.stat().st_size != size:
            found = file.stat().st_size
            raise CheckpointError(f"{file} is damaged: {found:,} bytes instead of {size:,}. {_way_out(path)}")


def _way_out(path: Path) -> str:
    others = [checkpoint_name(step) for step in find_steps(path.parent)]
    older = others[: others.index(path.name)] if path.name in others else []
    instead = f"continue from {older[-1]}" if older else "start again"
    return f"Put it back, or delete {path.name} to {instead}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block, hold the lock on `folder`; first, remove unfinished files that a killed process left behind.

    Raises CheckpointError if another run holds the lock, if the folder can't be written to, or if such files can't be
    removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise CheckpointError(
            f"another run is writing its checkpoints to {folder}; wait until it ends, or choose another --checkpoint-dir"
        ) from error
    except OSError as error:
        raise CheckpointError(f"checkpoints can't be written to {folder} ({error.strerror})") from error
    with lock:
        for left in [*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REMOVED}*")]:
            with _removal_of(left):
                shutil.rmtree(left)
        yield


@contextmanager
def _removal_of(path: Path) -> Iterator[None]:
    """Within the block, turn an OSError, which may name a single file without its folder, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be removed ({error.strerror or error}); delete it by hand") from error


def check_new_folder(folder: Path) -> None:
    """Raise CheckpointError unless `folder`, which doesn't exist yet, can be created."""
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise CheckpointError(f"checkpoints can't be written to {folder}: {existing} isn't a writable folder")


def clear_unfinished(folder: Path) -> None:
    """Remove unfinished files that killed or interrupted processes left in `folder`; keep complete checkpoints.

    Raises CheckpointError if another run holds the folder's lock.
    """
    with locked(folder):
        pass  # `locked` cleans up first


def begin(path: Path) -> Path:
    """Return the path of the temporary folder for a new checkpoint's files; it's the same on every rank."""
    return path.with_name(f"{UNFINISHED}{path.name}")


def commit(unfinished: Path, **description: object) -> Path:
    """Describe the files that all ranks have written, flush everything to disk, and give the folder its final name."""
    files = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
    checkpoint = Checkpoint(format=FORMAT, files=files, **description)
    with open(unfinished / DESCRIPTION, "w") as file:
        json.dump(asdict(checkpoint), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    path = unfinished.with_name(unfinished.name.removeprefix(UNFINISHED))
    os.rename(unfinished, path)
    sync_folder(path.parent)
    return path


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints except the newest `count`. Each is renamed first, so none is ever left half deleted.

    Raises CheckpointError for a checkpoint that can't be removed.
    """
    for step in find_steps(folder)[:-count]:
        path, doomed = folder / checkpoint_name(step), folder / f"{REMOVED}{checkpoint_name(step)}"
        with _removal_of(path):
            os.rename(path, doomed)
        with _removal_of(doomed):
            shutil.rmtree(doomed)


@contextmanager
def atomic_file(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file that's renamed to `path` when the block ends, so readers see all of it or nothing.

    If the block fails or the disk is full, any old file at `path` stays as it was, and nothing else is left behind.
    """
    path = Path(path)
    file = tempfile.NamedTemporaryFile(mode, dir=path.parent, prefix=f".{path.name}-", delete=False)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(file.name)
        raise


def sync_folder(folder: Path) -> None:
    """Flush `folder` to disk, including the names of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
