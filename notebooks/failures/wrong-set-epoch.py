"""# The data comes in the same order in every epoch

**Why.** `DistributedSampler` shuffles based on its seed and its epoch, and only you know which epoch it is.

**How to tell.** Print the first indices of two epochs: they're the same. A resumed run that starts again at epoch 0
gets the first epoch's order.

**The fix.** Call `sampler.set_epoch(epoch)` at the start of every epoch. After resuming, continue with the saved epoch.

**What you see.**

    AssertionError: rank 0 gets the images [[4, 7, 2, 1], [4, 7, 2, 1]] instead of [[4, 7, 2, 1], [5, 2, 7, 1]]
    AssertionError: rank 1 gets the images [[0, 3, 5, 6], [0, 3, 5, 6]] instead of [[0, 3, 5, 6], [4, 6, 3, 0]]

**Also seen as**

- the same order of samples in every epoch
- resuming mid-epoch with skip_first_batches gives different batches; samples are repeated or left out
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
sampler = DistributedSampler(range(8), shuffle=True)
orders, right = [], []
for epoch in range(2):
    # fixed: sampler.set_epoch(epoch)
    orders.append(list(sampler))
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
    right.append(shuffled[rank::world_size])
assert orders == right, f"rank {rank} gets the images {orders} instead of {right}"
dist.destroy_process_group()
