"""# Cannot writeback when the parameter shape changes

**Why.** The model was changed after it had been sharded: `resize_token_embeddings`, `.to(dtype)`, `deepcopy`, a new
head, pruning, an EMA copy. By then, the modules' parameters are views or shards.

**How to tell.** Search the code between the sharding and the first step for lines that change `model`.

**The fix.** First build the model, resize it, add adapters, cast it and move it; then shard it; then create the
optimizer. If you need a copy, build a second model and call `load_state_dict` on it.

**What you see.**

    rank 0 in `assert torch.equal(model(images), right)`
    RuntimeError: Cannot writeback when the parameter shape changes
    Expects torch.Size([16]) but got torch.Size([3, 8])

**Also seen as**

- deepcopy of an FSDP model for EMA fails
- adding tokens or layers after FSDP fails
- `Cannot writeback`
- `FSDP does not support deepcopy`, `Only Tensors created explicitly by the user (graph leaves) support the deepcopy
  protocol` (a run on the CPU)
- `invalid gradient at index 1 - got [0] but expected shape compatible with` (torch's engine.cpp)
- `FSDP does not support changing the parameters between forward and backward`, `Expects tensor to be on the compute
  device` (torch/distributed/fsdp/_flat_param.py)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)), torch.randn(8, 8)
three_classes = torch.randn(3, 8)
right = model[:2](images) @ three_classes.T

# fixed: model[2].weight = nn.Parameter(three_classes)
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
model.module[2].weight = nn.Parameter(three_classes)  # broken
assert torch.equal(model(images), right)
dist.destroy_process_group()
