"""# Eight ranks learn no faster than one

**Why.** Without a sampler, or with a sampler that isn't given the rank, every process reads the same images. All ranks
then have the same gradient, and averaging doesn't change it.

**How to tell.** Every rank logs the same loss in every step. Print the first indices, or the sum of the first batch, on
each rank.

**The fix.** Give every rank its own images: `DistributedSampler(dataset)`, or `images[rank::world_size]`.

**What you see.**

    AssertionError: the norm of the gradient is 1.200 instead of 1.191 for all images

**Also seen as**

- an IterableDataset without a split gives every rank the same samples
- all GPUs have the same loss value in each step or epoch
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layer, images = nn.Linear(8, 2), torch.randn(8, 8)
alone = copy.deepcopy(layer)
alone(images).square().mean().backward()

model = DistributedDataParallel(layer)
batch = images[: len(images) // world_size]  # broken: the first half, on every rank
# fixed: batch = images[rank::world_size]
model(batch).square().mean().backward()
norm, right = layer.weight.grad.norm().item(), alone.weight.grad.norm().item()
assert abs(norm / right - 1) < 1e-5, f"the norm of the gradient is {norm:.3f} instead of {right:.3f} for all images"
dist.destroy_process_group()
