"""Data loaders: their worker processes fail, hang, or take memory, files and time."""

import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fsdp_helpers.teaching.failures.entry import Failure, Numbers

# ---------------------------------------------------------------- a sample that can't be read


class Images(Dataset):
    """Eight images, the sixth of which is damaged."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        if number == 5:
            raise OSError("image file is truncated")
        return torch.ones(2)


class ReplacedImages(Images):
    """The same images, with the one before in place of a damaged one."""

    def __getitem__(self, number: int) -> Tensor:
        try:
            return super().__getitem__(number)
        except OSError:
            return super().__getitem__(number - 1)


def count_values(dataset: Dataset, rank: int) -> Numbers:
    total = torch.zeros(1)
    for batch in DataLoader(dataset, sampler=range(8)[rank::2], batch_size=2, num_workers=1):
        total += batch.sum()
        dist.all_reduce(torch.ones(1))  # a step
    dist.all_reduce(total)
    return {"values": total.item()}


def read_a_damaged_image(rank: int, world_size: int) -> Numbers:
    return count_values(Images(), rank)


def replace_the_damaged_image(rank: int, world_size: int) -> Numbers:
    return count_values(ReplacedImages(), rank)


def all_values() -> Numbers:
    return {"values": 8 * 2}


# ---------------------------------------------------------------- a lock that is held while the loader forks

LOCK = threading.Lock()  # such as those of tokenizers, OpenCV and loggers


@contextmanager
def lock_held() -> Iterator[None]:
    """Hold the lock in another thread."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            held.set()
            done.wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    try:
        yield
    finally:
        done.set()


class Locked(Dataset):
    """Samples that are made under the lock."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        with LOCK:
            return 1


def fork_workers(rank: int, world_size: int) -> Numbers:
    with lock_held():
        loader = DataLoader(Locked(), num_workers=1, timeout=2)
        return {"samples": sum(map(len, loader))}


def start_fresh_workers(rank: int, world_size: int) -> Numbers:
    with lock_held():
        loader = DataLoader(Locked(), num_workers=1, multiprocessing_context="forkserver")
        return {"samples": sum(map(len, loader))}


def four_samples() -> Numbers:
    return {"samples": 4}


# ---------------------------------------------------------------- a file for each tensor

MORE_FILES = 30  # than are open already


@contextmanager
def few_files() -> Iterator[None]:
    """Allow a few more open files, as `ulimit -n` does; then restore the limit, and the way that tensors are sent."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    strategy = torch.multiprocessing.get_sharing_strategy()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + MORE_FILES, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
        torch.multiprocessing.set_sharing_strategy(strategy)


def keep_batches() -> Numbers:
    batches = list(DataLoader(torch.ones(2 * MORE_FILES, 2), num_workers=1))
    return {"batches": len(batches)}


def send_file_descriptors(rank: int, world_size: int) -> Numbers:
    with few_files():
        return keep_batches()


def send_file_names(rank: int, world_size: int) -> Numbers:
    with few_files():
        torch.multiprocessing.set_sharing_strategy("file_system")
        return keep_batches()


def sixty_batches() -> Numbers:
    return {"batches": 2 * MORE_FILES}


# ---------------------------------------------------------------- memory that workers copy

NUM_NAMES = 100_000


def private_bytes() -> int:
    """Return the bytes that this process has written to, and so doesn't share with the one that it was forked from."""
    with open("/proc/self/smaps_rollup") as rollup:
        return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty"))


class Names(Dataset):
    """File names; its one sample is the growth of the worker's memory while it reads all of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        before = private_bytes()
        for name in self.names:
            len(name)
        return private_bytes() - before


def copies_in_a_worker(names: Sequence[str], num_bytes: int) -> Numbers:
    (grown,) = DataLoader(Names(names), num_workers=1)
    return {"copies of the names": round(grown.item() / num_bytes)}


def keep_a_list(rank: int, world_size: int) -> Numbers:
    names = [f"image-{number:08d}.png" for number in range(NUM_NAMES)]
    return copies_in_a_worker(names, sum(map(sys.getsizeof, names)))


def keep_an_array(rank: int, world_size: int) -> Numbers:
    names = np.array([f"image-{number:08d}.png" for number in range(NUM_NAMES)])
    return copies_in_a_worker(names, names.nbytes)


def no_copy() -> Numbers:
    return {"copies of the names": 0}


# ---------------------------------------------------------------- workers that start again in every epoch


class Workers(Dataset):
    """Samples that are the numbers of the processes which made them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        return os.getpid()


def count_workers(loader: DataLoader) -> Numbers:
    return {"workers started in three epochs": len({pid.item() for _ in range(3) for pid in loader})}


def start_workers_in_each_epoch(rank: int, world_size: int) -> Numbers:
    return count_workers(DataLoader(Workers(), num_workers=1))


def keep_workers(rank: int, world_size: int) -> Numbers:
    return count_workers(DataLoader(Workers(), num_workers=1, persistent_workers=True))


def one_worker() -> Numbers:
    return {"workers started in three epochs": 1}
