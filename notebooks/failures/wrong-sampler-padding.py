"""# The accuracy depends on the number of ranks

**Why.** `DistributedSampler` pads the data: with five images on two ranks, it repeats one image, so that each rank has
three. That hardly matters in training, but in an evaluation, the repeated image counts twice.

**How to tell.** Add up how many images each rank evaluated, and compare the sum with the size of the data set.

**The fix.** Split the images among ranks without padding, and divide the total hits by the number of images. With a
sharded model, also give every rank the same number of batches, or
[the evaluation never ends](hang-uneven-batches.py).

**What you see.**

    AssertionError: 6 images were evaluated instead of 5

**Also seen as**

- single and multi-GPU evaluation differ; the validation accuracy is incorrect; DistributedSampler pads the number of
  samples
- test accuracy or IoU differs between one and several GPUs
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

mine = list(DistributedSampler(range(5), world_size, rank, shuffle=False))  # broken
# fixed: mine = range(5)[rank::world_size]
count = torch.tensor(len(mine))
dist.all_reduce(count)
assert count == 5, f"{count} images were evaluated instead of 5"
dist.destroy_process_group()
