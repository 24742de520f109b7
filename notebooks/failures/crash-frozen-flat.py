"""# Must flatten tensors with uniform requires_grad

**Why.** FSDP1 flattens all of a unit's parameters into a single one, which either requires gradients or doesn't. So a
frozen layer and a trained layer can't be in the same unit.

**How to tell.** The error is raised while the model is being wrapped, before the first step. FSDP2 doesn't have this
limitation.

**The fix.** Pass `use_orig_params=True`, give frozen layers their own units, or move to FSDP2.

**What you see.**

    rank 0 in `model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))  # broken`
    ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`

**Also seen as**

- LoRA, PEFT, or a frozen backbone, encoder or layer fails while FSDP1 wraps the model
- use_orig_params must be True for LoRA, freezing or several parameter groups
- `` Must flatten tensors with uniform `requires_grad` when `use_orig_params=False` ``
- `` `FlatParameter` requires uniform `requires_grad` `` (an older PyTorch)
- `expects all parameters in the same parameter group of the module to have same requires_grad` (fairscale)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
model[0].requires_grad_(False)
right = model(images)

model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))  # broken
# fixed: model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
torch.testing.assert_close(model(images), right)
assert isinstance(model, FullyShardedDataParallel)
dist.destroy_process_group()
