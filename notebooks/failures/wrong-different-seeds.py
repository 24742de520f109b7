"""# The first loss is worse than in one process

**Why.** DDP and FSDP1's `sync_module_states` broadcast rank 0's weights. `fully_shard` doesn't send anything: each
rank keeps a shard of its own initial model, so the full model is a patchwork. Under hybrid sharding, the copies of
the model also start with different values.

**How to tell.** Compare the norm of a full parameter with its norm in a single-process run.

**The fix.** Use the same seed on every rank until the model is built, or load rank 0's state with
`set_model_state_dict` and `broadcast_from_rank0`.

**What you see.**

    AssertionError: the weight's norm is 1.6625 instead of 1.6093

**Also seen as**

- the first loss is worse than in one process
- the loss is higher and stagnates earlier: ranks start from different initial weights
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
right = nn.Linear(8, 8).weight.norm().item()

torch.manual_seed(rank)  # broken: too early; it's right for dropout, after the model is built
# fixed: torch.manual_seed(0)
model = fully_shard(nn.Linear(8, 8), mesh=mesh)
norm = model.weight.full_tensor().norm().item()
assert abs(norm / right - 1) < 1e-5, f"the weight's norm is {norm:.4f} instead of {right:.4f}"
dist.destroy_process_group()
