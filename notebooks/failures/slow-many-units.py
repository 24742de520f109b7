"""# Each step has hundreds of small collectives

**Why.** If every linear layer is a unit, each layer is all-gathered separately. A collective costs at least its
latency, however little it sends, and such small units hardly lower peak memory any further.

**How to tell.** Count the collectives in one step, and compare the largest unit with the average.

**The fix.** Make one unit per block: `for block in model.blocks: fully_shard(block)`.

**What you see.**

    AssertionError: 8 all-gathers in one step instead of 4

**Also seen as**

- FSDP is slower than DDP or than a single GPU
- FSDP training is very slow
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)]
model, images = nn.Sequential(*blocks), torch.randn(4, 8)

# fixed: for layer in model:
for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:  # broken
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

with CommDebugMode() as counter:
    model(images).sum().backward()
gathers = counter.get_comm_counts()[torch.ops.c10d._allgather_base_]
assert gathers == 4, f"{gathers} all-gathers in one step instead of 4"
dist.destroy_process_group()
