"""MNIST if it's available, otherwise the bundled digits, in one tensor from which each rank takes its batches."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_helpers.data.source import NUM_DIGITS_FOR_TEST, find_data_dir, source_at_hand

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, on a scale from 0 to 1


@dataclass(frozen=True, kw_only=True)
class Split:
    """Normalized float32 images (N, 1, 28, 28) and their int64 labels (N,), all on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        return Split(images=self.images.to(device), labels=self.labels.to(device))

    @property
    def num_bytes(self) -> int:  # shown in notebook 00
        return self.images.nbytes + self.labels.nbytes


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A run's training and test images, and their source."""

    source: str  # "mnist" or "digits"
    train: Split
    test: Split


def load_data(
    data_dir: str | os.PathLike | None = None, *, train_images: int | None = None, test_images: int | None = None
) -> Dataset:
    """Load MNIST if the data folder has it, otherwise the bundled digits: all images, or the first N of each split.

    This only reads files, so any number of ranks can call it at the same time. File sizes are checked
    here; `prepare_data` has already checked the contents.
    """
    folder = find_data_dir(data_dir)
    source = source_at_hand(data_dir)
    train, test = _read_mnist(folder) if source == "mnist" else _read_digits()
    return Dataset(source=source, train=_split(*train, train_images), test=_split(*test, test_images))


def epoch_order(num_images: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the images in an epoch, shape (num_images,); it doesn't depend on the number of ranks."""
    return np.random.default_rng([seed, epoch]).permutation(num_images)


def rank_batches(
    split: Split, *, rank: int, world_size: int, global_batch_size: int, seed: int, epoch: int, first_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of every global batch: images (B / world_size, 1, 28, 28) and labels (B / world_size,).

    Concatenated in rank order, the shares are the batch that a single process would draw. An incomplete last batch is
    dropped. The steps before `first_step`, which a resumed run has already taken, are skipped.
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
    """Yield this rank's share of the test images, each image on exactly one rank.

    Every rank gets the same number of batches (some may be empty). Each forward pass of a sharded model runs
    collectives, so if a rank stopped early, the others would hang.
    """
    for start in range(0, len(split), batch_size):
        batch = slice(start, start + batch_size)
        images = split.images[batch].tensor_split(world_size)[rank]
        yield images, split.labels[batch].tensor_split(world_size)[rank]


def normalize(pixels: Tensor) -> Tensor:
    """Turn pixels (N, 28, 28) from 0 to 255 into model input (N, 1, 28, 28): (x / 255 - 0.1307) / 0.3081."""
    return ((pixels.float() / 255 - PIXEL_MEAN) / PIXEL_STD).unsqueeze(1)


def _split(pixels: Tensor, labels: Tensor, count: int | None) -> Split:
    return Split(images=normalize(pixels[:count]), labels=labels[:count].clone())


def _read_mnist(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return pixels (N, 28, 28) and labels (N,), for training and for testing."""
    from torchvision.datasets import MNIST

    parts = [MNIST(folder, train=train) for train in (True, False)]
    return [(part.data, part.targets) for part in parts]


def _read_digits() -> list[tuple[Tensor, Tensor]]:
    """Return pixels (N, 28, 28) and labels (N,), for training and for testing, scaled up from 8 x 8 pixels.

    This reads the same file as `sklearn.datasets.load_digits`, whose values are 0 to 16, but without importing all of
    scikit-learn and SciPy.
    """
    package = Path(find_spec("sklearn").origin).parent
    rows = torch.from_numpy(np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=","))  # (1797, 65)
    small = rows[:, :-1].float().reshape(-1, 1, 8, 8) * (255 / 16)
    pixels = F.interpolate(small, size=(28, 28), mode="bilinear").squeeze(1)
    labels = rows[:, -1].long()
    cut = len(labels) - NUM_DIGITS_FOR_TEST
    return [(pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])]
