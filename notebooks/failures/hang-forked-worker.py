"""# A data loader with workers hangs before its first batch

**Why.** With `num_workers` above 0, the loader forks the process. A lock that a thread held at that moment (in
tokenizers, OpenCV, OpenMP or a logger) stays locked in the worker forever. An HDF5 or LMDB handle that was opened
before the fork is shared by all workers and stops working.

**How to tell.** Training works with `num_workers=0`. `py-spy dump --pid WORKER` shows a worker waiting inside a
library. The tokenizers library prints a warning: *The current process just got forked, after parallelism has already
been used*.

**The fix.** Set `TOKENIZERS_PARALLELISM=false`, and call `cv2.setNumThreads(0)`. Open files in `__getitem__` or
`worker_init_fn`. Start the workers before a library starts its threads, as here, or without a plain fork:
`DataLoader(..., multiprocessing_context='forkserver')`.

**What you see.** With `timeout=5`; without it, the loader waits forever:

    RuntimeError: DataLoader timed out after 5 seconds

**Also seen as**

- training hangs in next(iter(dataloader)), at the first batch, with num_workers > 0, but works with num_workers=0
- workers never return; fork, threads, OpenCV, cv2, tokenizers, HDF5, h5py, lmdb, zarr
- `DataLoader timed out after`
- `The current process just got forked, after parallelism has already been used`,
  `Disabling parallelism to avoid deadlocks`, `TOKENIZERS_PARALLELISM=(true` (tokenizers)
"""

import threading

from torch.utils.data import DataLoader, Dataset

lock, held, done = threading.Lock(), threading.Event(), threading.Event()


def thread_of_a_library():  # such as those of tokenizers and OpenCV
    with lock:
        held.set()
        done.wait()


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        with lock:  # a sample needs the library, too
            return number


thread = threading.Thread(target=thread_of_a_library, daemon=True)
loader = DataLoader(Samples(), num_workers=1, timeout=5)
thread.start()  # broken: the worker, a copy of this process, will find the lock held
held.wait()  # broken
batches = iter(loader)  # the fork
# fixed: thread.start()
# fixed: held.wait()
samples = [sample.item() for sample in batches]
done.set()
thread.join()
assert samples == [0, 1, 2, 3]
