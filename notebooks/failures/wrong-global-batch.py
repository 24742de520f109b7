"""# More GPUs, same recipe, worse accuracy

**Why.** The batch size is per rank: with eight ranks, each step covers eight batches, and an epoch has an eighth as
many steps. After the same number of epochs, the model has had fewer updates, and the learning rate is still the one
for a small batch.

**How to tell.** Compare the global batch size (per-rank batch size × ranks × micro-batches) and the number of steps
with the single-GPU run. If you divide one rank's counts by the size of the full data set, the result is off by a
factor of N.

**The fix.** Divide the per-rank batch size by N (which gives the same curve), or keep that size and raise the
learning rate, with a warmup. For metrics, call `dist.all_reduce(correct)` before dividing.

**What you see.**

    AssertionError: an epoch has 2 steps instead of 4, and the weights differ

**Also seen as**

- with the same number of epochs, the result on multiple GPUs is much lower
- DDP performs slightly worse, or much worse, than a single GPU or than DataParallel
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))
torch.manual_seed(0)
model, images = nn.Linear(8, 2), torch.randn(32, 8)
alone = copy.deepcopy(model)
fully_shard(model, mesh=mesh)

batch_size = 8  # broken: of each rank, as the recipe for one GPU says
# fixed: batch_size = 8 // world_size
num_steps = []
for one, share, ranks in ((model, rank, world_size), (alone, 0, 1)):
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    batches = images.split(batch_size * ranks if one is model else 8)
    for batch in batches:
        one(batch.chunk(ranks)[share]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    num_steps.append(len(batches))
same = torch.allclose(model.weight.full_tensor(), alone.weight, atol=1e-6)
assert same, f"an epoch has {num_steps[0]} steps instead of {num_steps[1]}, and the weights differ"
dist.destroy_process_group()
