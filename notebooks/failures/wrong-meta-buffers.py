"""# A model from the meta device computes nonsense

**Why.** `to_empty` gives every tensor uninitialized memory. Your initialization fills the parameters, but a buffer
that's computed in `__init__`, such as rotary frequencies, keeps whatever was in that memory. Loading a checkpoint
doesn't help if the checkpoint doesn't contain the buffer.

**How to tell.** Compare the model's `named_buffers()` with the buffers of a model built on the CPU.

**The fix.** Move the computation into a method, and call that method after `to_empty`.

**What you see.**

    AssertionError: the angles add up to nan

**Also seen as**

- random accuracy, garbage output or NaN after loading with param_init_fn, to_empty or sync_module_states
- non-persistent buffers aren't in the checkpoint
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Rotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("angles", torch.empty(8), persistent=False)  # computed, like rotary positions
        self.fill_buffers()

    def fill_buffers(self):
        self.angles.copy_(torch.arange(8) + 1.0)


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = Rotated()
model = fully_shard(model, mesh=mesh).to_empty(device="cpu")
model.angles.fill_(float("nan"))  # stands for whatever was in that memory
nn.init.ones_(model.layer.weight)
# fixed: model.fill_buffers()
total = model.angles.sum().item()
assert total == Rotated().angles.sum(), f"the angles add up to {total}"
dist.destroy_process_group()
