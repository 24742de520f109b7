"""Find the source of the images: MNIST (checked or downloaded once, in one process) or scikit-learn's digits."""

import hashlib
import io
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from filelock import FileLock

DOWNLOAD_TIMEOUT_S = 15.0
RETRY_AFTER_S = 3600.0  # how long to wait after a failed download, instead of trying again on every run
FAILED_DOWNLOAD = ".mnist-download-failed"  # the file in the data folder that records the failure

# The unpacked files: size in bytes and MD5.
MNIST_FILES = {
    "train-images-idx3-ubyte": (47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": (60_008, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": (7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": (10_008, "27ae3e4e09519cfbb04c329615203637"),
}
NUM_DIGITS_FOR_TEST = 360  # of the 1,797 bundled digits: the last fifth

HOW_TO_GET_MNIST = (
    "To use MNIST, put its four .gz files into the folder {folder}/MNIST/raw, or connect to the network and run again. "
    "After a failed download, the next attempt is an hour later; to try again now, delete "
    f"{{folder}}/{FAILED_DOWNLOAD}."
)


class DataError(Exception):
    """The data can't be used; the message gives the file or folder, and the fix."""


def find_data_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """Return the first of these that's set: `data_dir`, FSDP_DATA_DIR, or by default data/ at the project root.

    Without a project around the package, such as after the installation of a wheel, data/ is in the current folder.
    """
    project = Path(__file__).resolve().parents[2]
    default = project / "data" if (project / "pyproject.toml").is_file() else "data"
    return Path(data_dir or os.environ.get("FSDP_DATA_DIR") or default)


def offline() -> bool:
    """Return True if FSDP_OFFLINE is set: nothing is downloaded, and the digits are used even if MNIST is available."""
    return os.environ.get("FSDP_OFFLINE", "") not in ("", "0")


def prepare_data(data_dir: str | os.PathLike | None = None) -> str:
    """Make sure that workers will find their data; return the source, "mnist" or "digits".

    One process calls this before the workers start. MNIST is downloaded at most once, even if two notebooks start
    together, and its checksums are computed only here. A failed download isn't tried again for an hour.
    Raises DataError for a damaged file, a damaged download, or a folder that isn't writable.
    """
    if offline():
        return "digits"
    folder = find_data_dir(data_dir)
    if mnist_is_there(folder, checksums=True):
        return "mnist"
    with one_process_at_a_time(folder):
        if mnist_is_there(folder, checksums=True) or download_mnist(folder):
            return "mnist"
    return "digits"


def describe_source(source: str, data_dir: str | os.PathLike | None = None) -> str:
    """Return a sentence saying which data is used and, for the digits, how to get MNIST."""
    if source == "mnist":
        return "Data: MNIST, 60,000 training and 10,000 test images."
    if offline():
        return "Data: scikit-learn's 1,797 bundled digits, because FSDP_OFFLINE is set. To use MNIST, unset it."
    folder = data_dir or os.environ.get("FSDP_DATA_DIR") or os.path.relpath(find_data_dir())  # as it was given
    remedy = HOW_TO_GET_MNIST.format(folder=folder)
    return f"Data: scikit-learn's 1,797 bundled digits, because MNIST couldn't be downloaded. {remedy}"


def source_at_hand(data_dir: str | os.PathLike | None = None) -> str:
    """Return the source that's available now, "mnist" or "digits", without downloading anything."""
    return "mnist" if not offline() and mnist_is_there(find_data_dir(data_dir)) else "digits"


def num_train_images(source: str | None = None) -> int:
    """Return the number of training images in `source` or, by default, in the data available now."""
    return 60_000 if (source or source_at_hand()) == "mnist" else 1_797 - NUM_DIGITS_FOR_TEST


def num_test_images(source: str | None = None) -> int:
    """Return the number of test images in `source` or, by default, in the data available now."""
    return 10_000 if (source or source_at_hand()) == "mnist" else NUM_DIGITS_FOR_TEST


def mnist_is_there(folder: Path, *, checksums: bool = False) -> bool:
    """Return True if all four files are complete, False if one is missing. Raises DataError if one is damaged."""
    paths = [folder / "MNIST" / "raw" / name for name in MNIST_FILES]
    present = [path for path in paths if path.exists()]
    for path in present:
        num_bytes, md5 = MNIST_FILES[path.name]
        _check_size(path, num_bytes)
        if checksums:
            _check_content(path, md5)
    return len(present) == len(paths)


def packed_files(folder: Path) -> dict[str, str]:
    """Return the names and MD5 checksums of the .gz files in `folder`. Raises DataError if one is damaged."""
    from torchvision.datasets import MNIST

    raw = folder / "MNIST" / "raw"
    present = {name: md5 for name, md5 in MNIST.resources if (raw / name).exists()}
    for name, md5 in present.items():
        _check_content(raw / name, md5)
    return present


def _check_size(path: Path, num_bytes: int) -> None:
    if (found := path.stat().st_size) != num_bytes:
        raise DataError(f"{path} is damaged: {found} bytes instead of {num_bytes}. Delete it and run again.")


def _check_content(path: Path, md5: str) -> None:
    if _md5(path) != md5:
        raise DataError(f"{path} is damaged: its checksum is wrong. Delete it and run again.")


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(exist_ok=True)  # without parents, since the path may be mistyped
        lock = FileLock(folder / ".mnist.lock").acquire()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"MNIST isn't in {folder}, which can't be created or written to ({error.strerror}). Choose another folder "
            "with --data-dir or FSDP_DATA_DIR, or create its parent, or make it writable."
        ) from error
    with lock:
        yield


def download_mnist(folder: Path) -> bool:
    """Download MNIST to `folder`; return False if no mirror can be reached, or an attempt failed in the last hour.

    The files are downloaded to a temporary folder inside `folder` and moved into place once all four are complete, so
    an interrupted download leaves no partial files in place. A .gz file that's already there isn't downloaded again.
    """
    raw = folder / "MNIST" / "raw"
    packed = packed_files(folder)
    if _failed_lately(folder) and len(packed) < len(MNIST_FILES):
        return False
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as private:
        private_raw = Path(private) / "MNIST" / "raw"
        private_raw.mkdir(parents=True)
        for name in packed:
            shutil.copy(raw / name, private_raw)
        if not _fetched(private):
            (folder / FAILED_DOWNLOAD).write_text("MNIST couldn't be downloaded. Delete this file to try again now.\n")
            return False
        raw.mkdir(parents=True, exist_ok=True)
        for name, (num_bytes, md5) in MNIST_FILES.items():
            _check_size(private_raw / name, num_bytes)
            _check_content(private_raw / name, md5)
            os.replace(private_raw / name, raw / name)
    (folder / FAILED_DOWNLOAD).unlink(missing_ok=True)
    return True


def _failed_lately(folder: Path) -> bool:
    try:
        age_s = time.time() - (folder / FAILED_DOWNLOAD).stat().st_mtime
    except FileNotFoundError:
        return False
    return 0 <= age_s < RETRY_AFTER_S  # a negative age means that the clock was set back


def _fetched(folder: str) -> bool:
    """Download the missing files to `folder` and unpack them; return False if no mirror can be reached."""
    from torchvision.datasets import MNIST

    try:
        with _socket_timeout(DOWNLOAD_TIMEOUT_S), redirect_stdout(io.StringIO()):
            MNIST(folder, download=True)
    except (RuntimeError, OSError) as error:
        for name, md5 in MNIST.resources:
            path = Path(folder, "MNIST", "raw", name)
            if path.exists() and _md5(path) != md5:
                raise DataError(
                    f"the download of {name} is damaged ({path.stat().st_size} bytes, wrong checksum), so nothing "
                    "was kept. Try again; if the problem persists, the mirror is at fault."
                ) from error
        return False
    return True


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Within the block, limit how long sockets wait; without a limit, torchvision can hang for minutes on dead mirrors."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
