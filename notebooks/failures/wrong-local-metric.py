"""# Each rank reports a different accuracy

**Why.** A sampler gives each rank only some of the images, and a rank's accuracy or loss covers only those. If you
divide by the length of the full data set, the result is N times too small.

**How to tell.** Print the metric and the number of images on each rank.

**The fix.** Put both counts into one tensor, `totals`, call `dist.all_reduce(totals)`, then divide. Or use
`accelerator.gather_for_metrics`, torchmetrics, or `self.log(..., sync_dist=True)`.

**What you see.**

    AssertionError: rank 0 reports 100.0% instead of 77.8%
    AssertionError: rank 1 reports 50.0% instead of 77.8%

**Also seen as**

- each process returns a different accuracy, loss or validation result
- the validate function gives different values on each rank under DDP; which one is right
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, images, labels = nn.Linear(8, 2), torch.randn(9, 8), torch.randint(2, (9,))
hits = model(images).argmax(dim=1) == labels
right = hits.float().mean().item()

mine = slice(rank, None, world_size)  # this rank's images
hits = model(images[mine]).argmax(dim=1) == labels[mine]
accuracy = hits.float().mean().item()  # broken
# fixed: totals = torch.tensor([hits.sum(), len(hits)])
# fixed: dist.all_reduce(totals)
# fixed: accuracy = (totals[0] / totals[1]).item()
assert accuracy == right, f"rank {rank} reports {accuracy:.1%} instead of {right:.1%}"
dist.destroy_process_group()
