"""# Each rank runs a different unit: experts, heads, LayerDrop

**Why.** A unit all-gathers its parameters when it's called. If rank 0 calls one unit while rank 1 calls another, the
two all-gathers are matched with each other, and each rank computes with half of one layer and half of the other. If the
shapes differ, gloo aborts and NCCL hangs. It happens with a vision tower that's skipped when a batch has no images, or
with an expert that gets no tokens.

**How to tell.** Trace the forward pass on each rank: the ranks call different units, or a different number of units.

**The fix.** Call every unit on every rank, in the same order. If you don't need a unit's output, call the unit on a
dummy input and give its output a weight of 0: `loss + 0.0 * tower(blank).sum()`. Or, if only some ranks use a layer,
leave that layer in the root unit and call `set_reduce_scatter_unused_params(True)` (see
[wrong-unused-parameters](wrong-unused-parameters.py)).

**What you see.**

    AssertionError: the norm of the body's gradient is 0.398 instead of 0.503

**Also seen as**

- LayerDrop, experts without tokens (MoE, Mixtral, Qwen, DeepSeek) or skipped layers: training hangs with NCCL, aborts
  with gloo, or gives wrong results
- conditional computation: an if in forward calls a module, such as a vision tower, only on some ranks; sometimes it
  freezes
- `` Only some but not all ranks have a `None` `FlatParameter` gradient `` (torch/distributed/fsdp/_flat_param.py)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 2, bias=False) for _ in range(2)])

    def forward(self, samples, chosen):
        features = self.body(samples)
        return self.heads[chosen](features)  # broken: each rank calls one of the units
        # fixed: outputs = [head(features) for head in self.heads]
        # fixed: return outputs[chosen] + 0.0 * outputs[1 - chosen]


torch.manual_seed(0)
model, alone = TwoHeads(), TwoHeads()
alone.load_state_dict(model.state_dict())
samples = torch.randn(world_size, 4, 8)
for unit in (*model.heads, model):
    fully_shard(unit, mesh=mesh)

model(samples[rank], chosen=rank).square().mean().backward()
sum(alone(samples[each], chosen=each).square().mean() / world_size for each in range(world_size)).backward()
norm = round(model.body.weight.grad.full_tensor().norm().item(), 3)
right = round(alone.body.weight.grad.norm().item(), 3)
assert norm == right, f"the norm of the body's gradient is {norm} instead of {right}"
dist.destroy_process_group()
