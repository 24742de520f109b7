"""# Ranks on one machine take turns instead of running in parallel

**Why.** Each process starts one thread per core, so N ranks have N times as many threads as the machine has cores.
torchrun therefore limits each rank to one thread, which may be too few.

**How to tell.** Multiply `torch.get_num_threads()` by the number of ranks on this machine, and compare the product
with the number of cores.

**The fix.** Call `torch.set_num_threads(cores // ranks)`, as `launch` does, or set `OMP_NUM_THREADS`.

**What you see.**

    AssertionError: there are more threads than cores

**Also seen as**

- cores are busy, and each rank is slower than one process alone
- CPU usage is 100% on all cores, and each rank is slow
- `Setting OMP_NUM_THREADS environment variable for each process to be 1 in default` (a run on the CPU)
"""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world_size, cores = dist.get_world_size(), len(os.sched_getaffinity(0))

num_threads = max(2, cores)  # broken: as a process does by itself
# fixed: num_threads = max(1, cores // world_size)
torch.set_num_threads(num_threads)
running = torch.tensor(torch.get_num_threads())
dist.all_reduce(running)
assert running <= max(cores, world_size), "there are more threads than cores"
dist.destroy_process_group()
