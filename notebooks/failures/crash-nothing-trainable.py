"""# No parameter requires a gradient

**Why.** Either everything is frozen, or the only trainable parameters are inside a reentrant checkpoint whose inputs
don't require gradients, as happens with adapters in the layers.

**How to tell.** `sum(p.requires_grad for p in model.parameters())` is 0, or the warning *None of the inputs have
requires_grad=True* precedes the error.

**The fix.** In plain PyTorch, use `checkpoint(..., use_reentrant=False)`. With transformers, call
`model.enable_input_require_grads()` and pass `gradient_checkpointing_kwargs={'use_reentrant': False}`. Don't wrap a
frozen model in DDP.

**What you see.**

    rank 0 in `outputs.square().mean().backward()`
    RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn

**Also seen as**

- LoRA with gradient checkpointing fails in backward
- DDP refuses a frozen model
- `does not require grad and does not have a grad_fn`
- `None of the inputs have requires_grad=True. Gradients will be None`, `DistributedDataParallel is not needed when a
  module` (a run on the CPU)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)), torch.randn(8, 8)
model[0].requires_grad_(False)  # the other layers are an adapter
alone = copy.deepcopy(model)
alone(images).square().mean().backward()

for unit in (*model, model):
    fully_shard(unit, mesh=mesh)
outputs = checkpoint(model, images, use_reentrant=True)  # broken
# fixed: outputs = checkpoint(model, images, use_reentrant=False)
outputs.square().mean().backward()
torch.testing.assert_close(model[1].weight.grad.full_tensor(), alone[1].weight.grad)
dist.destroy_process_group()
