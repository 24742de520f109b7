"""# fully_shard does not support containers that do not implement forward

**Why.** A unit is unsharded when it's called. A `ModuleList` or `ModuleDict` has no `forward` and is never called: the
model calls the modules inside it.

**How to tell.** The message names the container.

**The fix.** Shard the modules in the list, not the list itself. Use `for block in model.layers: fully_shard(block)`
instead of `fully_shard(model.layers)`.

**What you see.**

    rank 0 in `fully_shard(model.blocks, mesh=mesh)  # broken`
    ValueError: fully_shard does not support containers that do not implement forward

**Also seen as**

- fully_shard fails on a ModuleList, a ModuleDict or model.layers
- `does not support containers that do not implement forward`
- `FSDP will not all-gather parameters for containers that do not implement forward` (a run on the CPU)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, images):
        for block in self.blocks:
            images = block(images)
        return images


torch.manual_seed(0)
model, images = TwoBlocks(), torch.randn(8, 8)
right = model(images)

fully_shard(model.blocks, mesh=mesh)  # broken
# fixed: for block in model.blocks:
# fixed:     fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
torch.testing.assert_close(model(images), right)
assert isinstance(model.blocks[0], FSDPModule), "the first block isn't a unit"
dist.destroy_process_group()
