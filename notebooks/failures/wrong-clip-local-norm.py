"""# Gradients are clipped by a different factor on each rank

**Why.** The norm of one rank's shards isn't the norm of the full gradient: in a large model, it's about the full norm
divided by the square root of N, the number of ranks. Clip by it, and each rank scales its shards by a different
factor, so the gradient's direction changes, and its norm stays above the limit.

**How to tell.** Each rank logs a different norm, smaller with more ranks. Computed again after clipping, the gradient's
norm is above the limit.

**The fix.** Use `nn.utils.clip_grad_norm_`, which handles DTensors and returns the norm; call `full_tensor()` on it
before you log it. With FSDP1, call `model.clip_grad_norm_`.

**What you see.**

    AssertionError: after clipping, the norm of the gradient is 0.0141 instead of 0.0100

**Also seen as**

- the gradient norm is off by √N: ranks log different norms, smaller with more GPUs or nodes
- clip_grad_norm_ gives a different norm on each rank; clip_grad_value or max_grad_norm has no effect
- `` `clip_grad_norm_()` should only be called on the root FSDP instance `` (a run on the CPU)
- `Gradient clipping with FSDP is not supported` (pytorch-lightning)
- `` do not support `clip_grad_value_` `` (accelerate)
- `stack expects a non-empty TensorList` (fairscale#364: a rank whose shard is empty)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.Linear(8, 2), torch.randn(8, 8)
alone = copy.deepcopy(model)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
for one in (model, alone):
    one(images).square().mean().backward()

shards = [p.grad.to_local() for p in model.parameters()]  # broken
nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, nn.utils.get_total_norm(shards))  # broken
# fixed: nn.utils.clip_grad_norm_(model.parameters(), 0.01)
nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
right = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
assert abs(norm / right - 1) < 1e-5, f"after clipping, the norm of the gradient is {norm:.4f} instead of {right:.4f}"
torch.testing.assert_close(model.weight.grad.full_tensor(), alone.weight.grad)
dist.destroy_process_group()
