"""# fully_shard doesn't support scalar parameters

**Why.** FSDP splits each parameter along its first dimension, but a scalar, such as a logit scale or a layer scale,
has no dimensions. `fully_shard` also rejects a parameter that isn't contiguous.

**How to tell.** `[name for name, p in model.named_parameters() if p.ndim == 0]` lists the scalars.

**The fix.** Replace the scalar with a one-element vector, `nn.Parameter(torch.ones(1))`, and reshape it in old
checkpoints with `tensor.reshape(1)`. If a parameter isn't contiguous, run
`parameter.data = parameter.data.contiguous()`.

**What you see.**

    ValueError: fully_shard doesn't support scalar parameters. Change scale to a 1D tensor with numel equal to 1.

**Also seen as**

- a 0-dim parameter breaks a move to FSDP: a temperature, a logit_scale or a layer scale
- a parameter isn't contiguous, or a dimension can't be divided among the ranks
- `fully_shard doesn't support scalar parameters`
- `doesn't support scalar parameters`, `to a 1D tensor with numel equal to 1`,
  `FSDP does not support non-contiguous parameters yet`, `FSDP does not support uneven sharding on dim` (a run on the
  CPU)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))  # broken
        # fixed: self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, images):
        return self.scale * self.layer(images)


model, images = Scaled(), torch.ones(4, 8)
alone = copy.deepcopy(model)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
torch.testing.assert_close(model(images), alone(images))
dist.destroy_process_group()
