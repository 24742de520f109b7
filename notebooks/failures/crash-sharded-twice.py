"""# A module or a mesh is used for FSDP twice

**Why.** Running a cell twice, or calling a framework's `prepare` on a sharded model, shards a unit again. Or a loop
over `model.modules()` starts with the root, which takes all the parameters. The layers' parameters are then DTensors
already, so `fully_shard` takes them for tensor-parallel parameters and tries to combine their mesh with its own, which
is the same mesh. If the mesh has no dimension names, that gives this message; if it does, *Cannot concatenate
overlapping meshes*.

**How to tell.** Before your call, `isinstance(module, FSDPModule)` is True, or the module's parameters are DTensors.

**The fix.** Shard each block once, then the root once: `for block in model.layers: fully_shard(block)`, then
`fully_shard(model)`. If you use `accelerator.prepare`, leave the sharding to it.

**What you see.**

    rank 0 in `fully_shard(module, mesh=mesh)`
    TypeError: Invariant encountered: value was None when it should not be

**Also seen as**

- fully_shard or FSDP is applied twice to the same module; nested wrapping; a cell that ran twice
- `Invariant encountered: value was None when it should not be`
- `can only be applied to a module once`, `FSDP auto wrapping requires modules to not already have FSDP applied`,
  `` already managed by `fully_shard` `` (a run on the CPU)
- `FSDP requires the DP and model parallel TP/EP mesh to be not None but got`
  (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)
- `is already wrapped by` (torch/distributed/fsdp/wrap.py)
- `FSDP requires the DP and TP mesh to have the same parent mesh but got` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
right = model(images)

# fixed: for module in (model[0], model[2], model):
for module in model.modules():  # broken: the root comes first
    fully_shard(module, mesh=mesh)
torch.testing.assert_close(model(images), right)
dist.destroy_process_group()
