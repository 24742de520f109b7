"""# auto_wrap_policy is set, but there's only one unit

**Why.** By default, FSDP1's `size_based_auto_wrap_policy` turns a module into a unit if it has at least 100 million
parameters. In a smaller model, the policy makes no units inside the root, and you get no warning.

**How to tell.** Print the model, or count the `FullyShardedDataParallel` modules in it: there's only one.

**The fix.** Pass a `min_num_params` that suits your model or, better, name the class of your blocks with
`ModuleWrapPolicy`.

**What you see.**

    AssertionError: 1 unit; the two large layers and the root would be 3

**Also seen as**

- one FullyShardedDataParallel in the printed model
- FSDP doesn't reduce memory with the default auto-wrap policy
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

policy = size_based_auto_wrap_policy  # broken: at least 100 million parameters
# fixed: policy = partial(size_based_auto_wrap_policy, min_num_params=64)
wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
num_units = sum(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules())
assert num_units == 3, f"{num_units} unit; the two large layers and the root would be 3"
dist.destroy_process_group()
