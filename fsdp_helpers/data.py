"""Real MNIST where it can be had, the bundled digits otherwise; one tensor, cut into rank batches."""

import hashlib
import io
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, on a scale from 0 to 1
DOWNLOAD_TIMEOUT_S = 15.0
RETRY_AFTER_S = 3600.0  # a download that failed is tried again after this long, not on every run
FAILED_DOWNLOAD = ".mnist-download-failed"  # the file in the data folder that remembers it
NUM_DIGITS_FOR_TEST = 360  # of the 1,797 bundled digits: the last fifth

# The unpacked files: size in bytes and MD5.
MNIST_FILES = {
    "train-images-idx3-ubyte": (47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": (60_008, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": (7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": (10_008, "27ae3e4e09519cfbb04c329615203637"),
}
HOW_TO_GET_MNIST = (
    "To use MNIST, put its four .gz files into the folder MNIST/raw of {folder}, or connect to the network and run "
    "again. The next download is tried an hour after the one that failed; to try at once, delete "
    f"{{folder}}/{FAILED_DOWNLOAD}."
)


class DataError(Exception):
    """The data cannot be used as they are; the message names the file or folder and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Images (N, 1, 28, 28), float32 and normalised, and their labels (N,), int64, on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        return Split(images=self.images.to(device), labels=self.labels.to(device))

    @property
    def num_bytes(self) -> int:
        return self.images.nbytes + self.labels.nbytes


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What a run trains and tests on, and where it came from."""

    source: str  # "mnist" or "digits"
    train: Split
    test: Split


def find_data_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """`data_dir`, else the variable FSDP_DATA_DIR, else data/ at the project's root."""
    chosen = data_dir or os.environ.get("FSDP_DATA_DIR")
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / "data"


def offline() -> bool:
    """Whether the variable FSDP_OFFLINE asks for the bundled digits: no download, and MNIST on disk is left alone."""
    return os.environ.get("FSDP_OFFLINE", "") not in ("", "0")


def prepare_data(data_dir: str | os.PathLike | None = None) -> str:
    """Make sure that workers find their data, and say which: "mnist" or "digits".

    Called by one process before the workers start: MNIST is downloaded at most once, also when two notebooks
    start together, and its checksums are computed here only. A download that failed is not tried again for an hour.
    Raises DataError for a damaged file, a damaged download, or a folder that cannot be written.
    """
    if offline():
        return "digits"
    folder = find_data_dir(data_dir)
    if _mnist_is_there(folder, checksums=True):
        return "mnist"
    with _one_process_at_a_time(folder):
        if _mnist_is_there(folder, checksums=True) or _downloaded(folder):
            return "mnist"
    return "digits"


def describe_source(source: str, data_dir: str | os.PathLike | None = None) -> str:
    """One or two sentences: which data are in use and, for the digits, how to get MNIST."""
    if source == "mnist":
        return "Data: MNIST, 60,000 training and 10,000 test images."
    if offline():
        return "Data: scikit-learn's 1,797 bundled digits, because FSDP_OFFLINE is set. To use MNIST, unset it."
    remedy = HOW_TO_GET_MNIST.format(folder=find_data_dir(data_dir).name)
    return f"Data: scikit-learn's 1,797 bundled digits, because MNIST could not be downloaded. {remedy}"


def num_train_images(source: str) -> int:
    """How many training images a source holds."""
    return 60_000 if source == "mnist" else 1_797 - NUM_DIGITS_FOR_TEST


def num_test_images(source: str) -> int:
    """How many test images a source holds."""
    return 10_000 if source == "mnist" else NUM_DIGITS_FOR_TEST


def load_data(
    data_dir: str | os.PathLike | None = None, *, train_images: int | None = None, test_images: int | None = None
) -> Dataset:
    """MNIST where the data folder holds it, else the bundled digits; the first so many images, or all.

    Reads only: any number of ranks may call it at the same time. Sizes of files are checked, their contents were
    by `prepare_data`.
    """
    folder = find_data_dir(data_dir)
    source = "mnist" if not offline() and _mnist_is_there(folder) else "digits"
    train, test = _read_mnist(folder) if source == "mnist" else _read_digits()
    return Dataset(source=source, train=_split(*train, train_images), test=_split(*test, test_images))


def epoch_order(num_images: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order of the images in one epoch, shape (num_images,). It knows nothing of ranks."""
    return np.random.default_rng([seed, epoch]).permutation(num_images)


def rank_batches(
    split: Split, *, rank: int, world_size: int, global_batch_size: int, seed: int, epoch: int, first_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of every global batch: images (B / world_size, 1, 28, 28) and labels (B / world_size,).

    The ranks' parts of a step, one after the other, are the batch that one process would draw. An incomplete
    last batch is dropped. `first_step` skips the steps that a resumed run has behind it.
    """
    order = epoch_order(len(split), seed=seed, epoch=epoch)
    images_per_rank = global_batch_size // world_size
    for step in range(first_step, len(split) // global_batch_size):
        start = step * global_batch_size + rank * images_per_rank
        chosen = torch.from_numpy(order[start : start + images_per_rank]).to(split.images.device)
        yield split.images[chosen], split.labels[chosen]


def evaluation_batches(
    split: Split, *, rank: int, world_size: int, batch_size: int = 1000
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of every test image, each image on exactly one rank.

    Every rank gets the same number of batches, some possibly empty: a sharded model gathers its parameters in
    each forward, so a rank that stopped early would leave the others waiting.
    """
    for start in range(0, len(split), batch_size):
        batch = slice(start, start + batch_size)
        images = split.images[batch].tensor_split(world_size)[rank]
        yield images, split.labels[batch].tensor_split(world_size)[rank]


def normalise(pixels: Tensor) -> Tensor:
    """Pixels (N, 28, 28) from 0 to 255 as model input (N, 1, 28, 28): (x / 255 - 0.1307) / 0.3081."""
    return ((pixels.float() / 255 - PIXEL_MEAN) / PIXEL_STD).unsqueeze(1)


def _split(pixels: Tensor, labels: Tensor, count: int | None) -> Split:
    return Split(images=normalise(pixels[:count]), labels=labels[:count].clone())


def _read_mnist(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Pixels (N, 28, 28) and labels (N,) for training and for testing."""
    from torchvision.datasets import MNIST

    parts = [MNIST(folder, train=train) for train in (True, False)]
    return [(part.data, part.targets) for part in parts]


def _read_digits() -> list[tuple[Tensor, Tensor]]:
    """Pixels (N, 28, 28) and labels (N,) for training and for testing, from 8 x 8 pixels with values 0 to 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / 16)  # (1797, 1, 8, 8)
    pixels = F.interpolate(small, size=(28, 28), mode="bilinear").squeeze(1)
    labels = torch.from_numpy(digits.target).long()
    cut = len(labels) - NUM_DIGITS_FOR_TEST
    return [(pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])]


def _mnist_is_there(folder: Path, *, checksums: bool = False) -> bool:
    """True where all four files are whole, False where any is absent; DataError where one is damaged."""
    paths = [folder / "MNIST" / "raw" / name for name in MNIST_FILES]
    present = [path for path in paths if path.exists()]
    for path in present:
        num_bytes, md5 = MNIST_FILES[path.name]
        _check_size(path, num_bytes)
        if checksums:
            _check_content(path, md5)
    return len(present) == len(paths)


def _check_size(path: Path, num_bytes: int) -> None:
    if (found := path.stat().st_size) != num_bytes:
        raise DataError(f"{path} is damaged: {found} bytes instead of {num_bytes}. Delete it and run again.")


def _check_content(path: Path, md5: str) -> None:
    if _md5(path) != md5:
        raise DataError(f"{path} is damaged: its checksum is wrong. Delete it and run again.")


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".mnist.lock").acquire()
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"MNIST is not in {folder}, and that folder cannot be written ({error.strerror}). "
            "Choose another with --data-dir or FSDP_DATA_DIR, or make it writable."
        ) from error
    with lock:
        yield


def _downloaded(folder: Path) -> bool:
    """Download MNIST into `folder`; False where no mirror can be reached, or none could within the last hour.

    The files arrive in a private folder beside their place and are moved when all four are whole, so an
    interrupted download leaves nothing behind. Packed files that are in place already are used, not fetched.
    """
    from torchvision.datasets import MNIST

    raw = folder / "MNIST" / "raw"
    packed = {name: md5 for name, md5 in MNIST.resources if (raw / name).exists()}
    if _failed_lately(folder) and len(packed) < len(MNIST.resources):
        return False
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as private:
        private_raw = Path(private) / "MNIST" / "raw"
        private_raw.mkdir(parents=True)
        for name, md5 in packed.items():
            _check_content(raw / name, md5)
            shutil.copy(raw / name, private_raw)
        if not _fetched(private):
            (folder / FAILED_DOWNLOAD).write_text("MNIST could not be downloaded. Delete this file to try at once.\n")
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
    return 0 <= age_s < RETRY_AFTER_S  # below zero the clock was set back: the age is not known


def _fetched(folder: str) -> bool:
    """Fetch into `folder` what is not there yet, and unpack; False where no mirror can be reached."""
    from torchvision.datasets import MNIST

    try:
        with _socket_timeout(DOWNLOAD_TIMEOUT_S), redirect_stdout(io.StringIO()):
            MNIST(folder, download=True)
    except (RuntimeError, OSError) as error:
        for name, md5 in MNIST.resources:
            path = Path(folder, "MNIST", "raw", name)
            if path.exists() and _md5(path) != md5:
                raise DataError(
                    f"{name} arrived damaged ({path.stat().st_size} bytes, wrong checksum), and nothing was kept. "
                    "Run again; if it happens again, the mirror is at fault."
                ) from error
        return False
    return True


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision's download sets no time-out of its own; without one a dead mirror can hang for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
