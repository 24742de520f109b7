"""# The optimizer got an empty parameter list

**Why.** FSDP1 with `use_orig_params=False`, its default, replaces the parameters with one `_flat_param` per unit.
Parameter groups that are chosen by name (no weight decay for norms) match nothing, and parameters from before the
wrapping are gone.

**How to tell.** The names in `[name for name, _ in model.named_parameters()]` end in `_flat_param`. (With
`use_orig_params=True`, they still contain `_fsdp_wrapped_module.`, so compare the end of a name.)

**The fix.** Wrap with `FullyShardedDataParallel(model, use_orig_params=True)` first, and then make the groups from the
wrapped model's `named_parameters()`. FSDP2 keeps the names.

**What you see.**

    rank 0 in `optimizer = torch.optim.SGD(weights, lr=0.1, weight_decay=0.1)  # and none for biases`
    ValueError: optimizer got an empty parameter list

**Also seen as**

- parameter groups with different learning rates or weight decay fail under FSDP
- parameter names change to _flat_param or contain _fsdp_wrapped_module
- `optimizer got an empty parameter list`
- `_fsdp_wrapped_module._flat_param` (a run on the CPU)
- `with an empty parameter list`, `` `params` were not found in `` (torch/distributed/fsdp/_flat_param.py)
- `The optimizer does not seem to reference any FSDP parameters` (pytorch-lightning)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
alone = copy.deepcopy(model)

model = FullyShardedDataParallel(
    model,
    device_id=torch.device("cpu"),
    # fixed: use_orig_params=True,
)
for one in (model, alone):
    weights = [parameter for name, parameter in one.named_parameters() if name.endswith("weight")]
    optimizer = torch.optim.SGD(weights, lr=0.1, weight_decay=0.1)  # and none for biases
    one(images).square().mean().backward()
    optimizer.step()
torch.testing.assert_close(model(images), alone(images))
dist.destroy_process_group()
