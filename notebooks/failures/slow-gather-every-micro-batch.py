"""# Gradient accumulation over four micro-batches makes the network four times as busy

**Why.** Each micro-batch takes a forward pass and a backward pass, and each pass all-gathers the units again.

**How to tell.** Count the all-gathers in one step: the count grows with the number of micro-batches.

**The fix.** If the parameters fit, keep them unsharded within a step: call `model.set_reshard_after_forward(False)`
once, and `model.set_reshard_after_backward(is_last)` for each micro-batch.

**What you see.**

    AssertionError: 24 all-gathers in a step; the model has 3 units

**Also seen as**

- gradient accumulation is no faster: each micro-batch communicates
- gradient accumulation under FSDP isn't faster; there's an all-gather in each micro-step; no_sync
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
for module in (model[0], model[2], model[4], model):
    fully_shard(module, mesh=mesh)
micro_batches = torch.randn(8, 8).chunk(4)

keep = False  # broken
# fixed: keep = True  # a step's parameters have to fit
model.set_reshard_after_forward(not keep)
with CommDebugMode() as counter:
    for number, batch in enumerate(micro_batches, start=1):
        model.set_reshard_after_backward(number == len(micro_batches) or not keep)
        model(batch).sum().backward()
gathers = counter.get_comm_counts()[torch.ops.c10d._allgather_base_]
assert gathers == 3, f"{gathers} all-gathers in a step; the model has 3 units"
dist.destroy_process_group()
