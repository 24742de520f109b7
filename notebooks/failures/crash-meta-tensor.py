"""# Cannot copy out of meta tensor; no data

**Why.** A model built on the meta device has shapes but no values, so there's nothing to copy. If you use such a
model as it is, it fails with *is not on the expected device meta* or, if it's sharded, with *should be materialized
from meta device*.

**How to tell.** `[name for name, p in model.named_parameters() if p.is_meta]` isn't empty.

**The fix.** Call `model.to_empty(device=...)` after `fully_shard`, then load or initialize the parameters and the
buffers.

**What you see.**

    rank 0 in `model = model.to("cpu")  # broken`
    NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()

**Also seen as**

- low_cpu_mem_usage, init_empty_weights or cpu_ram_efficient_loading ends in an error about meta tensors
- a parameter, buffer, rotary table or tied head is still on the meta device; missing keys in the checkpoint
- `Cannot copy out of meta tensor; no data!`
- `is not on the expected device meta`, `FSDP parameters should be materialized from meta device before training`,
  `Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()`,
  `Tensor on device cpu is not on the expected device meta`, `Tensor.item() cannot be called on meta tensors`,
  `Cannot copy out of meta tensor`, `` Unable to call `reset_parameters()` for module on meta device `` (a run on the
  CPU)
- `Tensor on device meta is not on the expected device cuda:0` (torch/_prims_common/__init__.py)
- `c10d::broadcast_: attempted to run this operator with Meta tensors` (an older PyTorch)
- `` is on the meta device, we need a `value` to put in on ``, `You can't move a model that has some modules offloaded
  to cpu or disk` (accelerate, transformers)
- `some parameters are on the meta device` (accelerate)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
with torch.device("meta"):
    model = nn.Linear(8, 2)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

model = model.to("cpu")  # broken
# fixed: model = model.to_empty(device="cpu")
for parameter in model.parameters():
    nn.init.ones_(parameter)
total = model(torch.ones(8)).sum().item()
assert total == 2 * (8 + 1), f"the outputs' sum is {total}"
dist.destroy_process_group()
