"""# GPUs wait for data

**Why.** N ranks need data N times as fast, but the data still comes from one disk and is prepared by the same cores.
Loader workers restart with every epoch unless they're persistent.

**How to tell.** If steps run at full speed when you repeat one batch, the loader is the bottleneck. GPU utilization
looks like a sawtooth, and drops to 0 at the start of each epoch.

**The fix.** Use `DataLoader(num_workers=cores // ranks, persistent_workers=True, pin_memory=True,
prefetch_factor=4)`. Read from a local disk, and decode the data only once, ahead of time.

**What you see.**

    AssertionError: 3 workers were started in three epochs instead of 1

**Also seen as**

- GPU utilization is low, goes up and down, or is 0% for seconds: the step waits for the next batch; num_workers
- training pauses at the start of each epoch; the data is read from NFS, S3 or a slow disk
"""

import os

from torch.utils.data import DataLoader, Dataset


class Workers(Dataset):  # a sample is the ID of the process that made it
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return os.getpid()


loader = DataLoader(Workers(), num_workers=1)  # broken
# fixed: loader = DataLoader(Workers(), num_workers=1, persistent_workers=True)
started = {worker.item() for epoch in range(3) for worker in loader}
assert len(started) == 1, f"{len(started)} workers were started in three epochs instead of 1"
