"""# trying to initialize the default process group twice

**Why.** Something else has already created the process group: `Accelerator`, a Trainer, Lightning, or a cell that ran
twice.

**How to tell.** `dist.is_initialized()` is True before your call.

**The fix.** Write `if not dist.is_initialized(): dist.init_process_group(...)`. If you use a framework, let the
framework make this call.

**What you see.**

    rank 0 in `dist.init_process_group("gloo")  # broken`
    ValueError: trying to initialize the default process group twice!

**Also seen as**

- init_process_group is called twice: in the script and in the Trainer, Accelerator, Lightning or a notebook cell
- `initialize the default process group twice`
- `The specified group name has already been created` (torch/distributed/distributed_c10d.py)
- `AcceleratorState has already been initialized and cannot be changed` (accelerate)
"""

import torch
import torch.distributed as dist

for _ in range(2):  # a cell that you run twice, or the framework's call and your own
    dist.init_process_group("gloo")  # broken
    # fixed: if not dist.is_initialized():
    # fixed:     dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2
dist.destroy_process_group()
