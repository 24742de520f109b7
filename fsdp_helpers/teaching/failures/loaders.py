"""Data loaders whose worker processes fail, hang, take too long, or use too much memory or too many files."""

import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
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
    """Eight images, with each damaged image replaced by the one before it."""

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
    """Hold the lock in another thread until the block ends."""
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
    """A dataset that holds the lock while it creates a sample."""

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
    """Allow only a few more open files, as `ulimit -n` does, and restore the limit when the block ends."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + MORE_FILES, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def keep_batches() -> Numbers:
    batches = list(DataLoader(torch.ones(2 * MORE_FILES, 2), num_workers=1))
    return {"batches": len(batches)}


def keep_the_limit(rank: int, world_size: int) -> Numbers:
    with few_files():
        return keep_batches()


def raise_the_limit(rank: int, world_size: int) -> Numbers:
    with few_files():
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as `ulimit -n` does before the start
        return keep_batches()


def sixty_batches() -> Numbers:
    return {"batches": 2 * MORE_FILES}


# ---------------------------------------------------------------- memory that workers copy

NUM_NAMES = 100_000


def private_bytes() -> int:
    """Return how many bytes this process no longer shares with its parent because it has written to them."""
    with open("/proc/self/smaps_rollup") as rollup:
        return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty"))


class Names(Dataset):
    """A dataset of file names; its only sample is the growth of a worker's memory while it reads all the names."""

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
    """A dataset whose samples hold the ID of the process that created them."""

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


LOADERS = (
    Failure(
        name="crash-bad-batch",
        title="A DataLoader worker exits or fails on one rank",
        why=(
            "A worker process died or raised an exception: a file is damaged, a transform fails on one sample, or "
            "host memory ran out. Only that rank fails; the others report a timeout or a lost connection."
        ),
        tell=(
            "The first traceback says *Caught ... in DataLoader worker process*. To find the line, set `num_workers=0`."
        ),
        fix=(
            "Catch bad samples inside the dataset and replace them, so that every rank still gets the same number of "
            "samples. *Killed* means that host memory ran out: use fewer workers, a smaller `prefetch_factor`, "
            "and arrays instead of lists of Python objects."
        ),
        messages=(
            "in DataLoader worker process 0",
            "in DataLoader worker process",
        ),
        behavior=(
            "host memory grows with the number of workers and ranks until a worker is killed",
            "one rank dies in its data loader and the rest hang",
            "a corrupted image or sample kills one worker; it fails at a random step on one rank",
            "collate_fn fails: tensors of different size in a batch",
        ),
        quotes={
            "a run on the CPU": (
                "exited unexpectedly",
                "is killed by signal: Killed",
                "is killed by signal: Aborted",
                "is killed by signal: Terminated",
                "is killed by signal: Segmentation fault",
                "stack expects each tensor to be equal size",
                "each element in list of batch should be of equal size",
            ),
            "torch/utils/data/dataloader.py": ("Pin memory thread exited unexpectedly",),
        },
        broken=read_a_damaged_image,
        fixed=replace_the_damaged_image,
        right=all_values,
        says="in DataLoader worker process 0",
    ),
    Failure(
        name="hang-forked-worker",
        title="A data loader with workers hangs before its first batch",
        why=(
            "With `num_workers` above 0, the loader forks the process. A lock that a thread held at that moment (in "
            "tokenizers, OpenCV, OpenMP or a logger) stays locked in the worker forever. An HDF5 or LMDB handle that "
            "was opened before the fork is shared by all workers and stops working."
        ),
        tell=(
            "Training works with `num_workers=0`. `py-spy dump --pid WORKER` shows a worker waiting inside a library. "
            "The tokenizers library prints a warning: *The current process just got forked, after parallelism has "
            "already been used*."
        ),
        fix=(
            "Set `TOKENIZERS_PARALLELISM=false`, and call `cv2.setNumThreads(0)`. Open files in `__getitem__` or "
            "`worker_init_fn`. Or start workers without a plain fork: `DataLoader(..., "
            "multiprocessing_context='forkserver')`."
        ),
        messages=("DataLoader timed out after",),
        behavior=(
            "the data loader hangs or deadlocks with num_workers > 0, but works with num_workers=0",
            (
                "stuck at the first batch: workers never return; fork, threads, OpenCV, cv2, tokenizers, HDF5, h5py, "
                "lmdb, zarr"
            ),
            "training hangs in next(iter(dataloader)) on some ranks",
            "a worker times out; DataLoader timed out",
        ),
        quotes={
            "tokenizers": (
                "The current process just got forked, after parallelism has already been used",
                "Disabling parallelism to avoid deadlocks",
                "TOKENIZERS_PARALLELISM=(true",
            ),
        },
        broken=fork_workers,
        fixed=start_fresh_workers,
        right=four_samples,
        says="DataLoader timed out after 2 seconds",
        stall_s=30.0,  # far above the two seconds in which nothing moves here
    ),
    Failure(
        name="crash-open-files",
        title="Too many open files",
        why=(
            "A loader worker passes each tensor as a file descriptor, which stays open in the rank for as long as the "
            "tensor is in use. If you keep batches (here, all 60 in a list), or many workers prefetch batches of many "
            "tensors, a rank exceeds its limit, usually 1,024 open files."
        ),
        tell="To see the limit, run `ulimit -n` or `python -m fsdp_helpers doctor` inside the job.",
        fix=(
            "Don't keep batches: copy what you need with `batch.clone()`. Or raise the limit with `ulimit -n 65536`, "
            "or call `torch.multiprocessing.set_sharing_strategy('file_system')` at the top of the script."
        ),
        messages=("Too many open files",),
        behavior=(
            "fails after an epoch or some hundred batches with many loader workers",
            "[Errno 24]; ulimit -n; num_workers × prefetched batches",
        ),
        quotes={
            "a run on the CPU": (
                "received 0 items of ancdata",
                "unable to open shared memory object",
                "Resource temporarily unavailable",
                "can't start new thread",
                "OSError: [Errno 24]",
                "BlockingIOError: [Errno 11]",
            ),
        },
        broken=keep_the_limit,
        fixed=raise_the_limit,
        right=sixty_batches,
        says="Too many open files",
    ),
    Failure(
        name="memory-loader-workers",
        title="Loader workers take up more host memory with every epoch",
        why=(
            "Forked workers share the data set's memory until something writes to it, and Python updates a reference "
            "count whenever it touches an object. So a list of a million paths or dictionaries gets copied, page by "
            "page, into each worker of each rank."
        ),
        tell=(
            "With `num_workers=0`, memory use stays flat. The workers' total PSS (from `smem` or "
            "`/proc/PID/smaps_rollup`) grows with the number of samples read. The run ends with *Killed* or *Cannot "
            "allocate memory*."
        ),
        fix=(
            "Keep the metadata in one NumPy array, tensor, Arrow table or memory map, or serialize the list before you "
            "give it to a `torch.utils.data` dataset. Use fewer workers, and limit the size of any caches inside the "
            "dataset."
        ),
        numbers=("RAM grows steadily in every epoch; GPU memory doesn't",),
        behavior=(
            (
                "increasing RAM during training until the job is killed; memory leak in the DataLoader; 30 GB at the "
                "start, 200 GB after a couple of epochs"
            ),
            "RAM usage is multiplied by num_workers and by the number of GPUs",
            "host memory, RSS or shared memory grows from epoch to epoch; copy-on-write, list, dict",
            "the job is killed by the OOM killer in the middle of training, after hours or epochs, not at the start",
            "CPU memory keeps increasing for hours or days, until the OOM killer kills the job",
        ),
        quotes={
            "a run on the CPU": (
                "OSError: [Errno 12] Cannot allocate memory",
                "is killed by signal: Killed",
            ),
        },
        broken=keep_a_list,
        fixed=keep_an_array,
        right=no_copy,
    ),
    Failure(
        name="slow-data-loader",
        title="GPUs wait for data",
        why=(
            "N ranks need data N times as fast, but the data still comes from one disk and is prepared by the same "
            "cores. Loader workers restart with every epoch unless they're persistent."
        ),
        tell=(
            "If steps run at full speed when you repeat one batch, the loader is the bottleneck. GPU utilization looks "
            "like a sawtooth, and drops to 0 at the start of each epoch."
        ),
        fix=(
            "Use `DataLoader(num_workers=cores // ranks, persistent_workers=True, pin_memory=True, "
            "prefetch_factor=4)`. Read from a local disk, and decode the data only once, ahead of time."
        ),
        behavior=(
            "GPU utilization is low or drops to zero between batches or epochs under DDP",
            "training pauses at the start of each epoch",
            "data loading is the bottleneck; GPU utilization is low",
            "GPU utilization goes up and down, and is 0% for seconds; the step waits for the next batch; num_workers",
            "each epoch begins with a long pause; workers are started again",
            "the data is read from NFS, S3 or a slow disk",
        ),
        broken=start_workers_in_each_epoch,
        fixed=keep_workers,
        right=one_worker,
    ),
)
