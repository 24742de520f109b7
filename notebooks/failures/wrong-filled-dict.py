"""# The distance from the pretrained weights stays zero

**Why.** `set_model_state_dict` writes into the dictionary that you pass. After the call, the dictionary holds
DTensors. With `broadcast_from_rank0`, these are the model's own parameters, so they change in every training step.
No error is raised.

**How to tell.** `type(next(iter(weights.values())))` is `Tensor` before the call and `DTensor` after it.

**The fix.** Pass a copy, `dict(weights)`, or read the file again. The copy is shallow, so it duplicates no tensors.

**What you see.**

    AssertionError: the distance from the pretrained weights is 0.0

**Also seen as**

- the distance from the pretrained weights stays zero
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
alone, images = nn.Linear(8, 2), torch.randn(8, 8)
weights = copy.deepcopy(alone.state_dict())  # pretrained
model = fully_shard(nn.Linear(8, 2), mesh=mesh)

from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, weights, options=from_rank_0)  # broken
# fixed: set_model_state_dict(model, dict(weights), options=from_rank_0)
for one in (model, alone):
    one(images).square().mean().backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
start = weights["weight"]
start = start.full_tensor() if isinstance(start, DTensor) else start
distance = (model.weight.full_tensor() - start).norm().item()
right = (alone.weight - start).norm().item()
torch.testing.assert_close(model.weight.full_tensor(), alone.weight)
assert abs(distance / right - 1) < 1e-5 if right else distance, (
    f"the distance from the pretrained weights is {distance}"
)
dist.destroy_process_group()
