"""# Loader workers take up more host memory with every epoch

**Why.** Forked workers share the data set's memory until something writes to it, and Python updates a reference count
whenever it touches an object. So a list of a million paths or dictionaries gets copied, page by page, into each
worker of each rank.

**How to tell.** With `num_workers=0`, memory use stays flat. The workers' total PSS (from `smem` or
`/proc/PID/smaps_rollup`) grows with the number of samples read. The run ends with *Killed* or *Cannot allocate
memory*.

**The fix.** Keep the metadata in one NumPy array, tensor, Arrow table or memory map, or serialize the list before you
give it to a `torch.utils.data` dataset. Use fewer workers, and limit the size of any caches inside the dataset.

**What you see.**

    AssertionError: the worker made 1 copies of the names by reading them, instead of 0

**Also seen as**

- RAM grows steadily in every epoch until the OOM killer ends the job after hours; GPU memory doesn't; memory leak in
  the DataLoader
- host memory is multiplied by num_workers and by the number of GPUs; copy-on-write, list, dict
- `OSError: [Errno 12] Cannot allocate memory`, `is killed by signal: Killed` (a run on the CPU)
"""

import sys

import torch
from torch.utils.data import DataLoader, Dataset


def private_bytes():  # which this process doesn't share with its parent
    with open("/proc/self/smaps_rollup") as rollup:
        return 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty"))


class Growth(Dataset):  # its only sample is the worker's growth while it reads the names
    def __len__(self):
        return 1

    def __getitem__(self, _):
        before = private_bytes()
        for number in range(len(names)):
            len(names[number])
        return private_bytes() - before


names = [f"image-{number:08d}.png".encode() for number in range(100_000)]
num_bytes = sum(map(sys.getsizeof, names))
names = list(names)  # broken: an object for each name
# fixed: names = torch.tensor([list(name) for name in names], dtype=torch.uint8)  # one object
(grown,) = DataLoader(Growth(), num_workers=1)
copies = int(torch.round(grown / num_bytes))
assert copies == 0, f"the worker made {copies} copies of the names by reading them, instead of 0"
