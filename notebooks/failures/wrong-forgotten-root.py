"""# A layer that's in no unit is trained on each rank alone

**Why.** Only the blocks were made units. A layer outside of them, here the head, stays a plain parameter on every rank,
and its gradient isn't averaged: each rank trains it on its own batch, and the ranks' heads drift apart. No error is
raised, since the blocks become roots of their own.

**How to tell.** `[name for name, p in model.named_parameters() if not isinstance(p, DTensor)]` isn't empty. Compare
such a parameter across ranks after a few steps. `clip_grad_norm_`, and an optimizer with `foreach=True` or
`fused=True`, fail instead: [got mixed torch.Tensor and DTensor](crash-mixed-tensor-dtensor.py).

**The fix.** After the blocks, shard the model itself: `fully_shard(model)`. The root takes every parameter that isn't
in a unit yet.

**What you see.**

    AssertionError: after three steps, the head differs by 0.061 on rank 0
    AssertionError: after three steps, the head differs by 0.219 on rank 1

**Also seen as**

- it trains, a little worse than it should, and each rank saves a different head, embedding or norm
- fully_shard is called on the blocks or layers only, not on the root
- `got mixed torch.Tensor and DTensor` (a run on the CPU)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
alone, images = copy.deepcopy(model), torch.randn(8, 8)

for layer in (model[0], model[2]):  # the last layer isn't in any unit
    fully_shard(layer, mesh=mesh)
# fixed: fully_shard(model, mesh=mesh)
for one, batch in ((model, images[rank::world_size]), (alone, images)):
    optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
    for _ in range(3):
        one(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
head = model[4].weight
head = head.full_tensor() if isinstance(head, DTensor) else head
error = (head - alone[4].weight).abs().max()
assert error < 1e-5, f"after three steps, the head differs by {error:.3f} on rank {rank}"
dist.destroy_process_group()
