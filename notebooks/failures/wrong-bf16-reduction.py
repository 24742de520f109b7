"""# Convergence is a little worse than in one process

**Why.** Through PyTorch 2.14, `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` also reduces gradients in bf16, which
keeps 8 significant bits. Since 2.15, it reduces them in fp32. FSDP1 still reduces in bf16. The more ranks there are,
the more is lost to rounding.

**How to tell.** Compare one step's gradient norm with the fp32 norm. Here, they differ in the fourth digit.

**The fix.** Use `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. This doubles the number
of bytes that are reduced.

**What you see.**

    AssertionError: the norm of the gradient is 1.2158 instead of 1.2147

**Also seen as**

- the gradient norm differs from fp32's in the third or fourth digit
- gradients are reduced in bf16; reduce_dtype; FSDP's loss is slightly different from DDP's, or diverges late
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, images = nn.Linear(8, 2), torch.randn(8, 8)
alone = copy.deepcopy(model)
alone(images).square().mean().backward()

policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)  # broken
# fixed: policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)), mp_policy=policy)
model(images[rank::world_size]).square().mean().backward()
norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
right = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
assert abs(norm / right - 1) < 1e-5, f"the norm of the gradient is {norm:.4f} instead of {right:.4f}"
dist.destroy_process_group()
