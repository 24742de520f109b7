"""# Expected to have finished reduction in the prior iteration before starting a new one

**Why.** DDP waits for the gradient of every parameter. A head, branch or modality that a step doesn't use gets no
gradient, and neither does a layer whose output isn't part of the loss. The next forward pass finds the reduction
unfinished.

**How to tell.** Run one backward pass without DDP, and print
`[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]`. `TORCH_DISTRIBUTED_DEBUG=DETAIL` also
names these parameters.

**The fix.** Use `DistributedDataParallel(model, find_unused_parameters=True)`. Better yet, freeze or remove layers that
are never used, or add `0.0 * output.sum()` to the loss. If the unused parameters are the same in every step, pass
`static_graph=True`. Under FSDP2, see [wrong-unused-parameters](wrong-unused-parameters.py).

**What you see.**

    rank 0 in `each(samples, chosen=0).square().mean().backward()`
    RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.

**Also seen as**

- DDP fails in the second iteration; a branch, head, modality or expert isn't used in some steps
- find_unused_parameters, static_graph; a frozen or unused layer gets no gradient
- `Expected to have finished reduction in the prior iteration before starting a new one`,
  `your module has parameters that were not used in producing loss`
- `Parameter indices which did not receive grad for rank`,
  `` passing the keyword argument `find_unused_parameters=True` ``,
  `` making sure all `forward` function outputs participate in calculating loss ``,
  `Parameters which did not receive grad for rank`, `find_unused_parameters=True was specified in DDP constructor, but
  did not find any unused parameters`, `this is not compatible with static_graph set to True`,
  `your training graph has changed in this iteration`, `unused parameter detection` (a run on the CPU)
- `` Since `find_unused_parameters=True` is enabled `` (torch's reducer.cpp)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 2, bias=False) for _ in range(2)])

    def forward(self, samples, chosen):
        return self.heads[chosen](self.body(samples))


torch.manual_seed(0)
model, alone = TwoHeads(), TwoHeads()
alone.load_state_dict(model.state_dict())
samples = torch.randn(4, 8)
model = DistributedDataParallel(model)  # broken
# fixed: model = DistributedDataParallel(model, find_unused_parameters=True)

for _ in range(2):
    for each in (model, alone):
        each.zero_grad()
        each(samples, chosen=0).square().mean().backward()
torch.testing.assert_close(model.module.body.weight.grad, alone.body.weight.grad)
dist.destroy_process_group()
