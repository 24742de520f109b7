"""# Ranks disagree in evaluation

**Why.** A BatchNorm layer's running mean and variance are buffers: they aren't sharded, and FSDP doesn't synchronize
them. Each rank computes them from its own images, and a checkpoint keeps only one rank's values. (DDP copies rank 0's
values to all ranks before each forward pass.)

**How to tell.** Compare `running_mean` and `running_var` across the ranks.

**The fix.** Before you evaluate or save, average the buffers over the ranks, including the variance. The averaged
variance leaves out the distance between the ranks' means. With shuffled data, that distance is tiny, but if the values
on one of two ranks are shifted by 2, the averaged variance is 1.05 instead of 1.96. `SyncBatchNorm`, which needs GPUs,
includes the distance, and GroupNorm has no running statistics at all.

**What you see.**

    AssertionError: rank 0 says -3.639 about an image instead of -3.916
    AssertionError: rank 1 says -4.201 about an image instead of -3.916

**Also seen as**

- running_mean and running_var differ from rank to rank
- works in train mode, but is bad in eval mode, on several GPUs
- `SyncBatchNorm expected input tensor to be on GPU`, `Expected more than 1 value per channel when training`,
  `SyncBatchNorm layers only work with GPU modules` (a run on the CPU)
- `SyncBatchNorm is only supported within DistributedDataParallel` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images, halves = torch.randn(8, 8), [nn.BatchNorm1d(8) for _ in range(world_size)]
for number, layer in enumerate(halves):
    layer(images[number::world_size])  # what each rank sees
average = nn.BatchNorm1d(8).eval()
average.running_mean = torch.stack([layer.running_mean for layer in halves]).mean(dim=0)
average.running_var = torch.stack([layer.running_var for layer in halves]).mean(dim=0)
right = average(images[:1]).sum().item()

model = nn.Sequential(nn.BatchNorm1d(8))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
model(images[rank::world_size])
# fixed: for buffer in (model[0].running_mean, model[0].running_var):
# fixed:     dist.all_reduce(buffer)
# fixed:     buffer /= world_size
output = model.eval()(images[:1]).sum().item()
assert abs(output - right) < 1e-5, f"rank {rank} says {output:.3f} about an image instead of {right:.3f}"
dist.destroy_process_group()
