"""# Accumulation ends inside no_sync, or the flag is set too late

**Why.** If the last micro-batch's backward pass runs inside `no_sync`, its gradients aren't reduced. With FSDP1, the
full gradients then don't match the shards' shapes in `step`. With DDP, the ranks drift apart without an error. DDP also
checks the flag in the *forward pass*, so leaving `no_sync` before `backward` is too late. With FSDP2, gradients that
wait are left out of the step, without an error, and a unit that `set_reshard_after_backward(False)` leaves unsharded
keeps its old values for the next pass.

**How to tell.** With DDP and different images on each rank, `p.grad` differs across ranks after the last backward pass.
With FSDP1, `p.grad` has the full size instead of the shard's.

**The fix.** Write `with model.no_sync() if not is_last else nullcontext(): loss = model(batch); loss.backward()`, with
forward *and* backward inside. With FSDP2, call `model.set_requires_gradient_sync(is_last)` before the forward pass.

**What you see.**

    rank 0 in `optimizer.step()`
    RuntimeError: The size of tensor a (9) must match the size of tensor b (18) at non-singleton dimension 0

**Also seen as**

- changing the batch size and grad accum steps should not affect the loss, but it is clearly worse
- the loss is worse with gradient accumulation than with a large batch, under DDP
- `must match the size of tensor b`
- `attempting to assign a gradient of size` (a run on the CPU)
- `` Tensors of the same index must be on the same device and the same dtype except `step` tensors `` (torch's
  ForeachUtils.h)
- `` Expects `.grad` to be the unsharded gradient in `no_sync()` `` (torch/distributed/fsdp/_flat_param.py)
- `Shape mismatch when accumulating gradients` (torch/distributed/fsdp/_runtime_utils.py)
- `require_backward_grad_sync` (build-nanogpt PR #30)
- `assigned grad has data of a different size` (an older PyTorch)
"""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, images = nn.Linear(8, 2), torch.randn(8, 8)
alone = copy.deepcopy(model)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
alone(images).square().mean().backward()
optimizer.step()

model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = images[rank::world_size].split(2)
for batch in batches:
    is_last = False  # broken
    # fixed: is_last = batch is batches[-1]
    with nullcontext() if is_last else model.no_sync():
        (model(batch).square().mean() / len(batches)).backward()
optimizer.step()
torch.testing.assert_close(model(images), alone(images))
dist.destroy_process_group()
