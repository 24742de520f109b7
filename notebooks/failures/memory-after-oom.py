"""# After one step runs out of memory, later steps use more memory and give wrong results

**Why.** An exception in the middle of backward leaves FSDP in the state of a backward pass. If you catch it and go on
to the next batch, the units that were in backward are unsharded in the next forward pass but never resharded, and their
gradients aren't reduced: each rank holds full parameters and the gradients of its own batch. No error is raised.

**How to tell.** Between steps, memory use is higher than before the failure, and `type(next(model.parameters()))` isn't
DTensor.

**The fix.** After catching the exception, call `model.reset_iter_state()` on the root (PyTorch 2.15 or later), and then
`zero_grad()`, on every rank.

**What you see.**

    AssertionError: 360 bytes of parameters are held instead of 180

**Also seen as**

- out of memory once, then in every step; memory use is higher after the out of memory error was caught
- auto_find_batch_size or try/except around a step with FSDP; later steps have no reduce-scatter

Needs: torch >= 2.15
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
alone = copy.deepcopy(model)
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)


def run_out_in_backward(module, inputs, output):
    def run_out(gradient):
        raise torch.OutOfMemoryError("out of memory in backward")

    output.register_hook(run_out)


handle = model[1].register_forward_hook(run_out_in_backward)
try:
    model(images[rank::world_size]).square().mean().backward()
except torch.OutOfMemoryError:
    handle.remove()  # the next batch is smaller
# fixed: model.reset_iter_state()
model.zero_grad()

model(images[rank::world_size]).square().mean().backward()
alone(images).square().mean().backward()
held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
right = sum(p.nbytes for p in alone.parameters()) // world_size
assert held == right, f"{held} bytes of parameters are held instead of {right}"
torch.testing.assert_close(model[0].weight.grad.full_tensor(), alone[0].weight.grad)
dist.destroy_process_group()
