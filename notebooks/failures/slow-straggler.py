"""# All ranks wait for the slowest one

**Why.** No collective finishes before the last rank joins. If one GPU is too hot, shares its link or its CPU, or
gets longer sequences, its rank slows all ranks down.

**How to tell.** Time forward and backward on each rank *without* collectives, or look for the rank that enters each
all-reduce last. `nvidia-smi -q -d PERFORMANCE,CLOCK` shows throttling and clocks; `nvidia-smi -q` shows the PCIe
link's width.

**The fix.** Balance the work: sort sequences by length, and form batches by number of tokens. Take the slow node
out of the job, or stop whatever else is running on it. On Slurm, pass `--cpu-bind=cores`.

**What you see.**

    AssertionError: the slowest rank has 30 tokens; an even share is 20

**Also seen as**

- step time varies a lot between steps or ranks; sequence lengths differ between ranks
- throughput drops after hours, or with one particular node; jitter, stragglers
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
lengths = [9, 1, 8, 2, 7, 3, 6, 4]  # of texts, in tokens

mine = lengths[rank::world_size]  # broken: as they come
# fixed: ordered, both = sorted(lengths), 2 * world_size
# fixed: mine = ordered[rank::both] + ordered[both - 1 - rank :: both]  # there and back
slowest = torch.tensor(sum(mine))
dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # every rank waits for the one that has the most to do
right = sum(lengths) // world_size
assert slowest == right, f"the slowest rank has {slowest} tokens; an even share is {right}"
dist.destroy_process_group()
