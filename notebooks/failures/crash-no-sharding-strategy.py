"""# Sharding propagation failed: an operation that DTensor doesn't know

**Why.** DTensor needs a rule for how each operation works on shards. Rare operations, which turn up in logged
statistics, custom optimizers and initialization code, don't have one.

**How to tell.** The message names the operation, which starts with `aten.`. Before `fully_shard`, the same line
works.

**The fix.** If the operation is elementwise, apply it to the shard, `parameter.to_local()`. Otherwise, use
`parameter.full_tensor()` on every rank.

**What you see.**

    rank 0 in `values = model.weight.unique()  # broken`
    Sharding propagation failed for

**Also seen as**

- an operator isn't supported by DTensor; NotImplementedError in the optimizer's step, in init or in logging code
- a fused or custom optimizer (8-bit Adam, Adafactor, Shampoo) or kernel fails on DTensors
- `Sharding propagation failed for`
- `'DTensor' object has no attribute` (a run on the CPU)
- `does not have a sharding strategy registered`, `does not have a sharding strategy`
  (torch/distributed/tensor/_sharding_prop.py)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 2)
right = len(model.weight.unique())
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

values = model.weight.unique()  # broken
# fixed: values = model.weight.full_tensor().unique()
assert len(values) == right
dist.destroy_process_group()
