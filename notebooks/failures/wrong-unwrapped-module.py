"""# Each rank trains its own model

**Why.** DDP reduces gradients in hooks that the wrapper's `forward` prepares. `model.module(batch)`, or an earlier
`model = model.module`, bypasses the wrapper, so no gradients are sent, and no error is raised.

**How to tell.** If you delay one rank, the others don't wait for it. After a step, the ranks' parameters differ.

**The fix.** Call the wrapper in training: `loss = model(batch)`. Use `model.module` only to save, or to evaluate on
one rank.

**What you see.**

    AssertionError: the norms of the ranks' gradients are [0.975, 2.055] instead of [1.191, 1.191]

**Also seen as**

- model.module, a submodule, a loss method or self.model is called instead of the wrapper, or autograd.grad: the
  gradient reduction doesn't work
- gradients are not synchronized across ranks, without gradient communication: n independent models, weights on each
  GPU or node are different under DDP
- `'DistributedDataParallel' object has no attribute`, `'FullyShardedDataParallel' object has no attribute`,
  `'DataParallel' object has no attribute`, `object has no attribute 'module'` (a run on the CPU)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layer, images = nn.Linear(8, 2), torch.randn(8, 8)
layer(images).square().mean().backward()
right = [round(layer.weight.grad.norm().item(), 3)] * world_size
layer.zero_grad()
model = DistributedDataParallel(layer)

mine = images[rank::world_size]
loss = model.module(mine).square().mean()  # broken
# fixed: loss = model(mine).square().mean()
loss.backward()
norms = [None] * world_size
dist.all_gather_object(norms, round(layer.weight.grad.norm().item(), 3))
assert norms == right, f"the norms of the ranks' gradients are {norms} instead of {right}"
dist.destroy_process_group()
