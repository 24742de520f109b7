"""# A different number of tensors was saved during the original forward and recomputation

**Why.** Activation checkpointing runs the forward pass once more during backward and expects the same operations. If
the code branches on a counter, a cache (`use_cache=True`) or a random number drawn outside torch, the second pass takes
another path.

**How to tell.** `torch.utils.checkpoint.set_checkpoint_debug_enabled(True)` prints both lists of operations.

**The fix.** Decide outside the checkpointed function and pass the decision in:
`checkpoint(block, x, with_relu, use_reentrant=False)`.

**What you see.**

    rank 0 in `checkpoint(model, images, use_reentrant=False).square().mean().backward()  # broken`
    torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was saved

**Also seen as**

- CheckpointError in backward with activation checkpointing: MoE routing, dropout, use_cache, autocast or torch.compile
- activation checkpointing is applied in the wrong order, outside FSDP; checkpoint_wrapper
- `torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation`
- `Recomputed values for the following tensors have different metadata`, `tensor at position`,
  `Number of tensors saved during forward`,
  `trying to save more tensors during recomputation than during the original forward pass`,
  `torch.utils.checkpoint.CheckpointError`, `recomputed metadata`, `Trying to backward through the graph a second time`,
  `a second time (or directly access saved tensors after they have already been freed)` (a run on the CPU)
- `Unpack is being triggered for a tensor that was already unpacked once`,
  `Tensor cached during selective activation checkpoint has been mutated` (torch/utils/checkpoint.py)
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")


class ReluEverySecondTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(8, 8), 0

    def forward(self, images, with_relu=None):
        self.num_calls += 1
        with_relu = self.num_calls % 2 == 1  # broken: the recomputation counts, too
        hidden = self.layer(images)
        return hidden.relu() if with_relu else hidden


torch.manual_seed(0)
model, images = ReluEverySecondTime(), torch.randn(8, 8)
alone = copy.deepcopy(model)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

checkpoint(model, images, use_reentrant=False).square().mean().backward()  # broken
# fixed: checkpoint(model, images, True, use_reentrant=False).square().mean().backward()
alone.layer(images).relu().square().mean().backward()
torch.testing.assert_close(model.layer.weight.grad.full_tensor(), alone.layer.weight.grad)
dist.destroy_process_group()
