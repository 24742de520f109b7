"""# fully_shard doesn't lower peak memory

**Why.** `fully_shard(model)` on its own makes the entire model one unit. That unit is all-gathered before the first
layer runs, so every rank holds all parameters during forward and backward.

**How to tell.** There's only one all-gather per forward pass. Count the all-gathers with `CommDebugMode`, or with
this package's `trace_collectives`.

**The fix.** Shard each block first (`for block in model.blocks: fully_shard(block)`), and then the root
(`fully_shard(model)`).

**What you see.**

    AssertionError: 648 bytes are unsharded at once; the model has 648

**Also seen as**

- FSDP uses as much memory as DDP; no memory reduction with more GPUs; out of memory although sharded
- FSDP takes more memory than expected, or has the same memory usage as without it
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
images = torch.randn(8, 8)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
all_bytes, unsharded = sum(p.nbytes for p in model.parameters()), []

# fixed: for layer in (model[0], model[2], model[4]):
# fixed:     fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for layer in (model[0], model[2], model[4]):  # unsharded parameters aren't DTensors
    layer.register_forward_pre_hook(
        lambda *_: unsharded.append(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))
    )
model(images).sum().backward()
assert max(unsharded) < all_bytes / 2, f"{max(unsharded)} bytes are unsharded at once; the model has {all_bytes}"
dist.destroy_process_group()
