"""# Ranks use different heads, and their gradients are mixed up

**Why.** FSDP2 packs the gradients that a unit has into one buffer and reduces the buffer. Here, rank 0 has a gradient
for head 0, and rank 1 has one for head 1. Both are in the same place in the buffer and are added together, without an
error. Under DDP, `find_unused_parameters=True` prevents this.

**How to tell.** A head gets a gradient from samples that it hasn't seen. Compare the heads' gradients with a run in one
process.

**The fix.** Call `model.set_reduce_scatter_unused_params(True)` (PyTorch 2.13 or later), so that parameters without a
gradient contribute zeros.

**What you see.**

    AssertionError: the norm of the gradient of head 0 is 0.443 instead of 0.102
    AssertionError: the norm of the gradient of head 1 is 0.283 instead of 0.298

**Also seen as**

- gradients of two heads or experts are mixed up; ranks use different heads, experts or modalities
- find_unused_parameters has no counterpart in FSDP2

Needs: torch >= 2.13
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 2, bias=False) for _ in range(2)])

    def forward(self, samples, chosen):
        return self.heads[chosen](self.body(samples))


torch.manual_seed(0)
model, alone = TwoHeads(), TwoHeads()
alone.load_state_dict(model.state_dict())
samples = torch.randn(world_size, 4, 8)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
# fixed: model.set_reduce_scatter_unused_params(True)  # zeros, where a rank has no gradient

model(samples[rank], chosen=rank).square().mean().backward()
sum(alone(samples[each], chosen=each).square().mean() / world_size for each in range(world_size)).backward()
norm = round(model.heads[rank].weight.grad.to_local().norm().item(), 3)  # of this rank's shard
right = round(alone.heads[rank].weight.grad.chunk(world_size)[rank].norm().item(), 3)
assert norm == right, f"the norm of the gradient of head {rank} is {norm} instead of {right}"
dist.destroy_process_group()
