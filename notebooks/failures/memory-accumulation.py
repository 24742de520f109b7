"""# Accumulating gradients takes more memory than a large batch

**Why.** `no_sync` (FSDP1) and `set_requires_gradient_sync(False)` (FSDP2) save communication, but every rank then
keeps full gradients instead of shards until the last micro-batch.

**How to tell.** After the first micro-batch, memory has grown by 4 bytes per parameter of the full model.

**The fix.** Let gradients be reduced after each micro-batch: leave out `model.set_requires_gradient_sync(False)`,
unless full gradients fit in memory.

**What you see.**

    AssertionError: gradients take 576 bytes on a rank; its shards have 288

**Also seen as**

- memory grows with gradient_accumulation_steps under FSDP
- gradient accumulation needs more memory with FSDP than without
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(6, 8)
fully_shard(model, mesh=mesh)
shard_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters())

reduce_each = False  # broken: only the last micro-batch's backward will reduce
# fixed: reduce_each = True
model.set_requires_gradient_sync(reduce_each)
for batch in images.split(2):
    model(batch).sum().backward()
reduced = [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]
model.unshard()  # now its parameters are the full ones, with the gradients that nobody has reduced yet
full = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
waiting = sum(gradient.nbytes for gradient in reduced + full)
assert waiting == shard_bytes, f"gradients take {waiting} bytes on a rank; its shards have {shard_bytes}"
dist.destroy_process_group()
