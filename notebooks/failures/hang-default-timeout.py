"""# A timeout after half an hour doesn't name the missing rank

**Why.** A collective times out after 30 minutes on gloo and after 10 on NCCL, unless you say otherwise. Here, rank 1
isn't stuck: it writes a checkpoint for longer than that, and rank 0 waits for it. The message gives the limit in
milliseconds, but it doesn't name the rank that was missing.

**How to tell.** The time in the message is exactly the limit. To learn which rank is missing, call
`dist.monitored_barrier()` before the collective, on a gloo group. It names the first missing rank (*Rank 1 failed to
pass monitoredBarrier*), unless that is rank 0, which does the asking.

**The fix.** Pass `init_process_group` a `timeout=` that's longer than your longest preparation, evaluation or
checkpoint. Each group has its own limit: `new_group` accepts `timeout=`, too, and
`dist.set_timeout(limit, mesh.get_group())` changes that of a mesh's group. Better yet, prepare a large data set in a
job of its own. (Before PyTorch 2.15, there's no public `set_timeout`.)

**What you see.** With a limit of two seconds instead of half an hour:

    rank 0 in `dist.all_reduce(total, group=impatient)`
    RuntimeError: [unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete

**Also seen as**

- always fails after 10 or 30 minutes, while rank 0 tokenizes, downloads, compiles or saves and the others wait in a
  barrier
- ddp_timeout, or InitProcessGroupKwargs(timeout=...), has no effect or is too short
- `Timed out waiting 1800000ms for recv operation to complete`
- `wait timeout after 1800000ms`, `wait timeout after 600000ms, keys`, `timed out after 300000ms`,
  `failed to pass monitoredBarrier in` (a run on the CPU)
- `Socket Timeout` (torch's TCPStore.cpp)
- `store->get('0') got error`,
  `is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store`, `Timeout(ms)=1800000`
  (torch's ProcessGroupNCCL.cpp)
- `timed out waiting for all` (torch/distributed/elastic/utils/distributed.py)
- `timed out in monitoredBarrier after` (torch's ProcessGroupGloo.cpp)
- `Timed out waiting for key` (an older PyTorch)
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
limit = timedelta(seconds=2)  # broken: half an hour by default
# fixed: limit = timedelta(seconds=60)
impatient = dist.new_group(timeout=limit)

if dist.get_rank() == 1:
    time.sleep(3)  # writes a checkpoint
total = torch.ones(1)
dist.all_reduce(total, group=impatient)
assert total == dist.get_world_size()
dist.destroy_process_group()
