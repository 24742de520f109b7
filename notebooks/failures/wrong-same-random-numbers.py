"""# Every rank, or every worker, draws the same random numbers

**Why.** Every rank needs the same seed so that the weights start out equal, but that seed also gives every rank the
same dropout, noise and augmentations. Loader workers get their seeds (torch's, Python's and NumPy's) from the
rank's torch generator, so each rank's workers draw the same numbers as the other ranks' workers. A generator of
your own, such as `numpy.random.default_rng(0)` in the dataset, is copied into every worker, so all workers draw the
same numbers.

**How to tell.** Print `torch.rand(1)` and `numpy.random.rand()` on each rank and in each worker.

**The fix.** After the model is built, call `torch.manual_seed(seed + rank)` or, with accelerate,
`accelerate.utils.set_seed(seed, device_specific=True)`. Create your own generators in a `worker_init_fn`, from
`torch.initial_seed()`.

**What you see.**

    AssertionError: 2 ranks have 1 dropout mask

**Also seen as**

- augmentations, noise or dropout are identical on all GPUs or workers
- the same augmentation, noise, mask or dropout on every GPU; all ranks have the same seed; worker seeds
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))
torch.manual_seed(0)  # the same weights on every rank
model = fully_shard(nn.Linear(8, 2), mesh=mesh)

seed = 0  # broken: the same masks, too
# fixed: seed = rank
torch.manual_seed(seed)
mask = nn.functional.dropout(torch.ones(64))
masks = [torch.empty(64) for _ in range(world_size)]
dist.all_gather(masks, mask)
num_different = len({tuple(mask.tolist()) for mask in masks})
dist.destroy_process_group()
assert num_different == world_size, f"{world_size} ranks have {num_different} dropout mask"
