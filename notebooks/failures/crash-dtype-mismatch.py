"""# mat1 and mat2 must have the same dtype

**Why.** The weights are in bf16 and an input is in fp32, or the other way around. `MixedPrecisionPolicy` casts the
inputs to a unit's `forward`. The policy doesn't help if you converted the model by hand, or if a layer gets its input
from outside that `forward`.

**How to tell.** Print `x.dtype` and `layer.weight.dtype` on the line that fails. An adapter, a norm in fp32 or a
value head is often the culprit.

**The fix.** Keep the model in fp32 and compute in bf16: `MixedPrecisionPolicy(param_dtype=torch.bfloat16,
reduce_dtype=torch.float32)`. If only one layer differs, cast its input: `layer(x.to(layer.weight.dtype))`.

**What you see.**

    rank 0 in `outputs = model(images)`
    RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16

**Also seen as**

- an input, a norm, a timestep or an adapter is in float32 while the weights are in bfloat16 or half; LoRA, QLoRA, a
  value head
- autocast and mixed_precision are used together; a layer called outside forward or a custom buffer has a different
  dtype
- `mat1 and mat2 must have the same dtype, but got Float and BFloat16`
- `Input type (float) and bias type (c10::BFloat16) should be the same`,
  `Expected query, key, and value to have the same dtype`, `expected scalar type Half but found Float`,
  `expected scalar type BFloat16 but found Float`, `expected scalar type Float but found BFloat16`,
  `expected m1 and m2 to have the same dtype`, `mat1 and mat2 must have the same dtype`,
  `Input type (c10::BFloat16) and bias type (float) should be the same`, `self and mat2 must have the same dtype`,
  `must have the same dtype`, `Index put requires the source and destination dtypes match`,
  `Input type (float) and bias type`, `Input type (c10::Half) and bias type`, `not implemented for 'Half'` (a run on
  the CPU)
- `FlashAttention only support fp16 and bf16 data type` (torch's flash attention)
- `expected mat1 and mat2 to have the same dtype` (torch's LinearAlgebra.cpp)
- `Input type (torch.cuda.FloatTensor) and weight type`, `Input type (torch.cuda.HalfTensor) and weight type` (torch's
  Convolution.cpp)
- `for scaled_dot_product_attention to have the same dtype` (an older PyTorch)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.Linear(8, 2), torch.randn(4, 8)
alone = copy.deepcopy(model)

policy = MixedPrecisionPolicy()
model.to(torch.bfloat16)  # broken
# fixed: policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
outputs = model(images)
assert outputs.dtype == torch.bfloat16
torch.testing.assert_close(outputs.float(), alone(images), rtol=0.02, atol=0.02)
dist.destroy_process_group()
