"""# The loss doesn't move

**Why.** `fully_shard` replaces the model's parameters. An optimizer built earlier still holds the old tensors, which no
longer receive gradients. No error is raised.

**How to tell.** `optimizer.param_groups[0]['params'][0] is next(model.parameters())` is false.

**The fix.** Shard the model first, and then build the optimizer.

**What you see.**

    AssertionError: the losses are [0.268, 0.268, 0.268] instead of [0.268, 0.145, 0.09]

**Also seen as**

- the loss does not move, does not decrease; parameters are not updating
- the optimizer was created before FSDP, fully_shard, prepare, .to(device) or a replaced layer
- `No inf checks were recorded for this optimizer` (a run on the CPU)
- `the optimizer parameters are not on the same device` (accelerate)
- `a model and optimizer must be passed together to` (accelerate)
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
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # broken
fully_shard(model, mesh=mesh)
# fixed: optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer):
    losses = []
    for _ in range(3):
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(round(loss.item(), 3))
    return losses


losses, right = train(model, optimizer), train(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
assert losses == right, f"the losses are {losses} instead of {right}"
dist.destroy_process_group()
