"""# A model loaded in bf16 hardly learns

**Why.** bf16 keeps 8 significant bits, so an update below about 1/256 of a weight is rounded away. With a learning
rate of 1e-5, that's nearly every update. `fully_shard` keeps weights, gradients and Adam's state in the dtype that
the model was loaded in. No error is raised.

**How to tell.** The optimizer's parameters are in bf16: print `next(model.parameters()).dtype`. Count how many
weights a step changes.

**The fix.** Load the model in fp32, and compute in bf16: `fully_shard(model,
mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))`.

**What you see.**

    AssertionError: ten steps changed 0% of the weights

**Also seen as**

- bad convergence with bf16: a model loaded with torch_dtype=torch.bfloat16 learns worse, or not at all
- loss plateaus or fine-tuning is worse in pure bf16; parameters and optimizer state are bf16
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
images = torch.randn(8, 8).to(torch.bfloat16)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

loaded_in = torch.bfloat16  # broken: as from_pretrained(..., torch_dtype=torch.bfloat16)
# fixed: loaded_in = torch.float32
model = fully_shard(nn.Linear(8, 8).to(loaded_in), mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
for _ in range(10):
    model(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
after = [parameter.full_tensor() for parameter in model.parameters()]
changed = torch.cat([(new != old).flatten() for new, old in zip(after, before, strict=True)]).float().mean()
assert changed == 1, f"ten steps changed {changed:.0%} of the weights"
dist.destroy_process_group()
