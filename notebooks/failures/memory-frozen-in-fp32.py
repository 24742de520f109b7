"""# FSDP2 with adapters takes more memory than FSDP1

**Why.** The full model was cast to fp32, including the frozen base, so even weights that never change are stored in
fp32. With FSDP1, accelerate casts only the trainable parameters.

**How to tell.** `{p.dtype for p in model.parameters() if not p.requires_grad}` contains `float32`.

**The fix.** After loading, run `for p in model.parameters(): p.data = p.data.to(torch.float32 if p.requires_grad
else torch.bfloat16)`, and put the adapters in separate units.

**What you see.**

    AssertionError: a rank keeps 180 bytes of parameters instead of 108

**Also seen as**

- with LoRA, FSDP2 takes more GPU memory than FSDP
- the checkpoint is twice as large as the model: weights were upcast and are saved in float32
- `Upcasted low precision parameters in`, `FSDP upcast of low precision parameters to fp32` (accelerate)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
world_size = dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))
base, adapter = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False), nn.Linear(8, 2)
right = (2 * 72 + 4 * 18) // world_size  # bytes: 72 frozen values in bf16, 18 trained ones in fp32

for parameter in [*base.parameters(), *adapter.parameters()]:
    dtype = torch.float32  # broken: the frozen base, too
    # fixed: dtype = torch.float32 if parameter.requires_grad else torch.bfloat16
    parameter.data = parameter.data.to(dtype)
for module in (base, adapter):
    fully_shard(module, mesh=mesh)
kept = sum(parameter.to_local().nbytes for module in (base, adapter) for parameter in module.parameters())
assert kept == right, f"a rank keeps {kept} bytes of parameters instead of {right}"
dist.destroy_process_group()
