"""# DDP expects same model across all ranks

**Why.** The ranks built different models: each rank made a vocabulary from its own data, the code branches on the rank,
only rank 0 froze or resized something, or two nodes have different versions of a package.

**How to tell.** The message names a rank with a different number of parameters, or the first parameter whose size
differs. Print `[(n, p.shape) for n, p in model.named_parameters()]` on every rank.

**The fix.** Decide on rank 0 and broadcast the decision: `dist.broadcast_object_list([config])`. Then build, freeze and
resize on every rank.

**What you see.**

    RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has

**Also seen as**

- the number or shape of parameters differs between ranks; a tokenizer or vocabulary built per rank; layers are frozen
  or added on rank 0 only
- `DDP expects same model across all ranks`, `has inconsistent 0 params`, `params, while rank 0 has inconsistent`
- `appears not to match sizes of the same param in process 0`,
  `appears not to match strides of the same param in process 0` (torch's reducer.cpp)
"""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
num_layers = [2 if dist.get_rank() == 0 else 1]  # only rank 0 has read the settings
# fixed: dist.broadcast_object_list(num_layers)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers[0])))
model = DistributedDataParallel(model)
assert len(list(model.parameters())) == 2 * 2
dist.destroy_process_group()
