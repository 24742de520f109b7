"""# Muon on shards: updates of the wrong size and direction

**Why.** Muon orthogonalizes a full matrix. If you give it only one rank's rows, the update is off, here by 78% of its
norm, and on random matrices from 8 x 8 to 1,024 x 256, with 2 to 8 ranks, by 30 to 69%. No error is raised.
`torch.optim.Muon` handles DTensors correctly, but at a price: it all-gathers each matrix in every iteration of its
Newton-Schulz loop.

**How to tell.** Compare one step's update of one matrix with the update in one process.

**The fix.** Pass the DTensors to `torch.optim.Muon(matrices)`, not the result of `to_local()`. Use AdamW for everything
else.

**What you see.**

    AssertionError: the update is off by 78% of its norm

**Also seen as**

- Muon's updates differ from those in one process by a third or more
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.Linear(8, 8, bias=False), torch.randn(8, 8)
before, alone = model.weight.detach().clone(), copy.deepcopy(model)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
for one in (model, alone):
    one(images).square().mean().backward()

rows = nn.Parameter(model.weight.to_local().detach())  # broken
rows.grad = model.weight.grad.to_local()  # broken
torch.optim.Muon([rows], lr=0.1, weight_decay=0.0).step()  # broken
# fixed: torch.optim.Muon([model.weight], lr=0.1, weight_decay=0.0).step()
torch.optim.Muon([alone.weight], lr=0.1, weight_decay=0.0).step()
update, right = model.weight.full_tensor() - before, alone.weight - before
off = ((update - right).norm() / right.norm()).item()
assert off < 0.05, f"the update is off by {off:.0%} of its norm"  # Muon computes in bf16
dist.destroy_process_group()
