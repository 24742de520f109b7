"""# A chunked loss all-gathers the head again for each chunk

**Why.** Each chunk's logits are computed by calling the head. If the head is a unit, each call all-gathers it, and
so does each recomputation in backward.

**How to tell.** Count the all-gathers in one step with 1 chunk and with 4: the count grows with the number of
chunks.

**The fix.** Leave the head in the root unit: call `fully_shard(model)`, but not `fully_shard(model.head)`. The root
stays unsharded from forward to backward.

**What you see.**

    AssertionError: 10 all-gathers; 2 for the body and 1 for the root are enough

**Also seen as**

- the number of all-gathers grows with the number of chunks in a chunked loss
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint


class ChunkedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, tokens):
        return sum(checkpoint(self.loss_of, chunk, use_reentrant=False) for chunk in self.body(tokens).chunk(4))

    def loss_of(self, chunk):
        return self.head(chunk).logsumexp(dim=1).sum()


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model = ChunkedLoss()
units = [model.body, model.head]  # broken
# fixed: units = [model.body]
for unit in units:
    fully_shard(unit, mesh=mesh)
fully_shard(model, mesh=mesh)
with CommDebugMode() as counter:
    model(torch.randn(8, 8)).backward()
gathers = counter.get_comm_counts()[torch.ops.c10d._allgather_base_]
assert gathers == 3, f"{gathers} all-gathers; 2 for the body and 1 for the root are enough"
dist.destroy_process_group()
