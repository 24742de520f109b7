"""# FSDP1 expects the FORWARD_BACKWARD state, but the current state is IDLE

**Why.** FSDP1 expects one forward pass and then one backward pass through each unit, and it puts its hooks on the
tensors that it finds in a unit's output. It doesn't look for them inside an object of a class that it doesn't know. The
order also breaks if the loss doesn't use a unit's output, if there are two forward passes before a backward pass, or if
a forward pass runs under `inference_mode` or is tried again after an error.

**How to tell.** Remove the object around the output, the second forward pass, the frozen or unused branch, or
`auto_find_batch_size`, one after the other, until the error goes away. The first error in the log may be an
out-of-memory error that was caught.

**The fix.** Return tensors, or a tuple, a dictionary or a dataclass of tensors. Run one forward pass for each backward
pass, and use all outputs in the loss. Use `torch.no_grad()` instead of `inference_mode`. Set `use_orig_params=True`,
and don't make a unit of a module that isn't always used.

**What you see.**

    rank 0 in `model(images).scores.square().mean().backward()`
    current state is TrainingState.IDLE

**Also seen as**

- multiple forward and then multiple backward calls; inference_mode before training
- FSDP training crashes in backward, but DDP training works fine
- `expected to be in states [<TrainingState.FORWARD_BACKWARD: 2>] but current state is TrainingState.IDLE`
- `` Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False` ``,
  `Inference tensors cannot be saved for backward`, `` `no_sync()` on inner FSDP instances is not supported ``,
  `state has already been lazily initialized for`, `requires running forward through the root module first` (a run on
  the CPU)
- ``` Invalid: ``_post_backward_hook_state`` ```, `` Expects `BACKWARD_PRE` or `BACKWARD_POST` state but got ``, `` The
  `grad_fn` is needed to access the `AccumulateGrad` and register the post-backward hook ``, `HandleTrainingState.IDLE`
  (torch/distributed/fsdp/_runtime_utils.py)
- `Forward order differs across ranks`, `Expected to not all-gather any more parameters`
  (torch/distributed/fsdp/_exec_order_utils.py)
- `Cannot manually unshard parameters during forward/backward`, `Expects the handle training to be IDLE`
  (torch/distributed/fsdp/_unshard_param_utils.py)
- `Cannot set version_counter for inference tensor` (torch's TensorImpl.cpp)
- `Expects storage to be allocated` (torch/distributed/fsdp/_flat_param.py)
- `assert self.has_full_params` (fairscale#1134)
"""

from collections import namedtuple
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
Output = namedtuple("Output", ["scores"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, images):
        scores = self.layer(images)
        return SimpleNamespace(scores=scores)  # broken: FSDP1 doesn't look into it
        # fixed: return Output(scores)


torch.manual_seed(0)
model, images = Model(), torch.randn(8, 8)
right = torch.cat([g.flatten() for g in torch.autograd.grad(model.layer(images).square().mean(), model.parameters())])
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
model(images).scores.square().mean().backward()
norm, right = model.clip_grad_norm_(1e9).item(), right.norm().item()
assert abs(norm / right - 1) < 1e-5, f"the gradient's norm is {norm:.3f} instead of {right:.3f}"
dist.destroy_process_group()
