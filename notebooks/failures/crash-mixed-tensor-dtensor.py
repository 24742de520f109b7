"""# got mixed torch.Tensor and DTensor

**Why.** A unit's hooks unshard its parameters when you call the unit. If you call `model.forward`, or a layer inside
the unit, the hooks don't run, and the layer finds its shards, which are DTensors. A root that was never sharded, with
an optimizer that takes all parameters in one call, says the same: [wrong-forgotten-root](wrong-forgotten-root.py).

**How to tell.** In the traceback, the unit's `__call__` doesn't appear above the failing layer. If the traceback ends
in a `copy_`, a full state dict was copied into shards: [save-full-into-shards](save-full-into-shards.py).

**The fix.** Call the unit. If you need to call an inner module on its own, make that module a unit, too. For a method
such as `generate`, call `register_fsdp_forward_method(model, 'generate')` first.

**What you see.**

    RuntimeError: aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor

**Also seen as**

- generate, encode, encode_image, sample or a submodule of an FSDP2 model is called directly and fails in the first
  layer; only forward works
- a plain tensor, a mask, an index, a position or a cache meets DTensor parameters
- `got mixed torch.Tensor and DTensor`
- `need to convert all torch.Tensor to DTensor before calling distributed operators` (a run on the CPU)
- `aten.embedding.default: got mixed torch.Tensor and DTensor` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
right = model[0](images)

# fixed: fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
features = model[0](images)
torch.testing.assert_close(features, right)
dist.destroy_process_group()
