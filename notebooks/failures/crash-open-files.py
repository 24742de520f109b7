"""# Too many open files

**Why.** A loader worker passes each tensor as a file descriptor, which stays open in the rank for as long as the
tensor is in use. If you keep batches (here, all 60 in a list), or many workers prefetch batches of many tensors, a
rank exceeds its limit, usually 1,024 open files.

**How to tell.** `ulimit -n`, inside the job, prints the limit. `ls /proc/PID/fd | wc -l` counts the files that a rank
has open.

**The fix.** Don't keep batches: copy what you need with `batch.clone()`. Or raise the limit with `ulimit -n 65536`,
or call `torch.multiprocessing.set_sharing_strategy('file_system')` at the top of the script.

**What you see.**

    rank 0 in `batches = list(loader)  # broken`
    Too many open files

**Also seen as**

- fails after an epoch or some hundred batches with many loader workers
- [Errno 24]; ulimit -n; num_workers × prefetched batches
- `Too many open files`
- `received 0 items of ancdata`, `unable to open shared memory object`, `Resource temporarily unavailable`,
  `can't start new thread`, `OSError: [Errno 24]`, `BlockingIOError: [Errno 11]` (a run on the CPU)
- `bad value(s) in fds_to_keep` (Python)
"""

import os
import resource

import torch
from torch.utils.data import DataLoader

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
few = len(os.listdir("/dev/fd")) + 30
resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))  # as `ulimit -n` does

loader = DataLoader(torch.ones(60, 2), num_workers=1)
batches = list(loader)  # broken
# fixed: batches = [batch.clone() for batch in loader]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
assert sum(batch.sum() for batch in batches) == 60 * 2
