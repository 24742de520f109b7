"""# The logged gradient norm shrinks with the number of ranks

**Why.** The norm of a rank's local gradients covers only its own shards. In a large model, it's about the full norm
divided by the square root of N, the number of ranks.

**How to tell.** Each rank logs a different norm. If you also clip by it, the training is wrong:
[clipped by a different factor on each rank](wrong-clip-local-norm.py).

**The fix.** On every rank, compute the norm of the DTensors (`clip_grad_norm_` returns it), and call `full_tensor()` on
it.

**What you see.**

    AssertionError: rank 0 logs a norm of 0.206 instead of 0.307
    AssertionError: rank 1 logs a norm of 0.228 instead of 0.307

**Also seen as**

- the gradient norm is off by √N: ranks log different norms, smaller with more GPUs or nodes
- grad norm differs from DDP's, and changes with the number of GPUs
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model, images = nn.Linear(8, 64), torch.randn(8, 8)
alone = copy.deepcopy(model)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
for one in (model, alone):
    one(images).square().mean().backward()

norm = nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])  # broken
# fixed: norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
right = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
assert abs(norm / right - 1) < 1e-5, f"rank {rank} logs a norm of {norm:.3f} instead of {right:.3f}"
