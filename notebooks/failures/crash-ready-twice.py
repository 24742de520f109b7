"""# Expected to mark a variable ready only once

**Why.** DDP counts each parameter's gradient once per backward pass. Reentrant activation checkpointing starts a
second backward pass inside the first, which DDP's search for unused parameters doesn't know about. Recomputing one
module twice has the same effect, even without that search.

**How to tell.** The error occurs with `use_reentrant=True`, the old default of transformers' gradient checkpointing,
but not without checkpointing. `TORCH_DISTRIBUTED_DEBUG=DETAIL` names the parameter.

**The fix.** Use `checkpoint(layer, x, use_reentrant=False)`. In transformers, pass
`gradient_checkpointing_kwargs={'use_reentrant': False}`.

**What you see.**

    RuntimeError: Expected to mark a variable ready only once.

**Also seen as**

- gradient checkpointing and DDP with find_unused_parameters=True fail in backward; use_reentrant; LoRA
- under DDP, a layer that is recomputed is shared, or used twice in one forward pass
- `Expected to mark a variable ready only once`
- `has been marked as ready twice`, `` Use of a module parameter outside the `forward` function ``,
  `Reused parameters in multiple reentrant backward passes`, `_set_static_graph() as a workaround`,
  `multiple autograd engine hooks have fired`, `Multiple autograd engine hooks`,
  `the use_reentrant parameter should be passed explicitly` (a run on the CPU)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, images):
        hidden = self.first(images)
        return checkpoint(self.second, hidden, use_reentrant=True)  # broken
        # fixed: return checkpoint(self.second, hidden, use_reentrant=False)


module, images = Recomputed(), torch.randn(8, 8)
alone = copy.deepcopy(module)
alone(images).square().mean().backward()
model = DistributedDataParallel(module, find_unused_parameters=True)
model(images[rank::world_size]).square().mean().backward()
torch.testing.assert_close(module.first.weight.grad, alone.first.weight.grad)
dist.destroy_process_group()
