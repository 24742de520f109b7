"""# A single-GPU recipe learns too slowly on eight GPUs

**Why.** DDP and FSDP average the gradients over the ranks. If the loss is a sum, you get the full batch's gradient
divided by the number of ranks.

**How to tell.** With N ranks, the gradient norm is exactly 1/N of the norm in one process.

**The fix.** Use the mean over the batch. If the loss has to be a sum, call `(loss * world_size).backward()`.

**What you see.**

    AssertionError: the norm of the gradient is 13.514 instead of 27.027

**Also seen as**

- wrong gradients with DistributedDataParallel: averaged instead of summed across ranks
- DDP does not get the same gradients as a single process
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, alone = nn.Linear(8, 2), nn.Linear(8, 2)
model.load_state_dict(alone.state_dict())
images = torch.randn(8, 8)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))

loss = model(images[rank::world_size]).square().sum()
loss.backward()  # broken
# fixed: (loss * world_size).backward()  # FSDP divides by the number of ranks
alone(images).square().sum().backward()
norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
right = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
assert abs(norm / right - 1) < 1e-5, f"the norm of the gradient is {norm:.3f} instead of {right:.3f}"
dist.destroy_process_group()
