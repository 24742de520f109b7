"""# FSDP expects uniform original parameter dtype

**Why.** A unit's trained parameters are all-gathered and reduced in one buffer, so they all need the same dtype.
Adapters in fp32 on a trained base in bf16 break that rule. FSDP1's message is *Must flatten tensors with uniform
dtype*, and FSDP1 checks frozen parameters, too.

**How to tell.** `{p.dtype for p in model.parameters() if p.requires_grad}` has two elements.

**The fix.** Call `model.float()` before `fully_shard`, and pass `MixedPrecisionPolicy(param_dtype=torch.bfloat16,
reduce_dtype=torch.float32)` to compute in bf16. Or make the adapters separate units. With QLoRA, set
`bnb_4bit_quant_storage=torch.bfloat16`.

**What you see.**

    AssertionError: FSDP expects uniform original parameter dtype but got

**Also seen as**

- fp32 LoRA or QLoRA adapters on a bf16 base model can't be sharded
- bnb_4bit_quant_storage must have the dtype of the other weights for FSDP
- `FSDP expects uniform original parameter dtype but got`
- `Must flatten tensors with uniform dtype but got`, `Only Tensors of floating point and complex dtype can require
  gradients` (a run on the CPU)
- `Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32`, `Cannot flatten integer dtype
  tensors` (torch/distributed/fsdp/_flat_param.py)
- `FSDP expects uniform reduce dtype but got` (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)
- `Integer parameters are unsupported`, `Must flatten tensors with uniform dtype but got torch.float16 and
  torch.float32`, `` `FlatParameter` requires uniform dtype `` (an older PyTorch)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.randn(4, 8)
right = copy.deepcopy(model)(inputs)
model[0].to(torch.bfloat16)  # the base; PEFT creates the adapter, model[1], in fp32

policy = MixedPrecisionPolicy()  # broken
# fixed: model.float()
# fixed: policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=mesh, mp_policy=policy)
outputs = model(inputs)
torch.testing.assert_close(outputs.float(), right, rtol=0.05, atol=0.05)  # bf16 rounds to three digits
dist.destroy_process_group()
