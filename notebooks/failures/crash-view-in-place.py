"""# A view is being modified in place under FSDP or a backward hook

**Why.** FSDP's hooks turn a unit's inputs (FSDP2), or its parameters (FSDP1), into views. An `inplace=True` activation
at the start of a unit, or `+=` on a parameter or on part of an output, then writes into a view.

**How to tell.** The operation in the traceback ends in an underscore, or is `+=`, `*=` or `nn.ReLU(inplace=True)`.

**The fix.** Use `nn.ReLU(inplace=False)`, the default, and `x = x + y`; or put the activation into the same unit as the
layer before it.

**What you see.**

    rank 0 in `model(images).square().mean().backward()`
    is a view and is being modified inplace

**Also seen as**

- an in-place operation on the output of a wrapped module fails; inplace=True, +=
- `is a view and is being modified inplace`
- `a leaf Variable that requires grad is being used in an in-place operation`, `a view of a leaf Variable that requires
  grad is being used in an in-place operation`, `Inplace update to inference tensor outside InferenceMode is not
  allowed`, `returned a view tensor. An in-place op on this view` (a run on the CPU)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
body, images = nn.Linear(8, 8), torch.randn(8, 8)
head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 2))  # broken
# fixed: head = nn.Sequential(nn.ReLU(), nn.Linear(8, 2))

model = nn.Sequential(body, head)
alone = copy.deepcopy(model)
alone(images).square().mean().backward()  # without units, both are right
for unit in (body, head, model):
    fully_shard(unit, mesh=mesh)
model(images).square().mean().backward()
torch.testing.assert_close(body.weight.grad.full_tensor(), alone[0].weight.grad)
dist.destroy_process_group()
