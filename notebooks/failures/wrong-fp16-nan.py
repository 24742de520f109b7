"""# The loss becomes NaN in mixed precision

**Why.** The largest fp16 number is 65,504. Larger activations, losses and gradients become inf, and inf - inf is
NaN. Small gradients become 0. A `GradScaler` keeps small gradients from becoming 0 and skips steps in which a
gradient overflowed. All ranks have to skip the same steps. Using `torch.autocast` on top of a
`MixedPrecisionPolicy` casts twice.

**How to tell.** Check the loss and each layer's output with `torch.isfinite`, and find the first one that isn't
finite. In bf16, the same step is finite.

**The fix.** Use `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, since bf16 has the
same range as fp32. If you have to use fp16, use `torch.amp.GradScaler` (with FSDP1, `ShardedGradScaler`), which
finds an inf in any rank's shard, and leave out `autocast`. If you see *Attempting to unscale FP16 gradients*, the
trained parameters are in fp16, so load them in fp32.

**What you see.**

    AssertionError: the gradient's norm is inf

**Also seen as**

- loss is 0.0 and grad_norm is NaN
- a non-finite gradient norm; error_if_nonfinite
- `Attempting to unscale FP16 gradients.`, `unscale_() has already been called on this optimizer since the last
  update`, `unscale_() is being called after step()`, `step() has already been called since the last update()`, `is
  non-finite, so it cannot be clipped` (a run on the CPU)
- `Current loss scale already at minimum - cannot decrease scale`, `Minimum loss scale reached` (DeepSpeed, fairseq)
- `Gradient overflow. Skipping step, loss scaler`, `OVERFLOW! Rank 0 Skipping step` (apex, DeepSpeed)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model, images = nn.Linear(8, 8), 10_000 * torch.randn(8, 8)
alone = copy.deepcopy(model)

policy = MixedPrecisionPolicy(param_dtype=torch.float16)  # broken: squares of a few hundred are above 65,504
# fixed: policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=mesh, mp_policy=policy)
norms = []
for one in (model, alone):
    one(images).square().mean().backward()
    norms.append(nn.utils.get_total_norm([parameter.grad for parameter in one.parameters()]))
norm, right = norms[0].full_tensor().item(), norms[1].item()
assert abs(norm / right - 1) < 0.02, f"the gradient's norm is {norm}"  # bf16 rounds to three digits
dist.destroy_process_group()
