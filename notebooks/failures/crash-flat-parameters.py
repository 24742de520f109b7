"""# 'weight' must be 2-D: FSDP1's parameters are flat outside forward

**Why.** FSDP1 keeps a unit's parameters in a single one-dimensional tensor, of which each rank has a shard. Only the
unit's own call all-gathers it and gives the layers their weights back. A layer or a method that's called on its own
(`generate`, `encode`, an embedding, a weight that's read or merged between steps) finds flat, cut or empty weights.

**How to tell.** The weights have one dimension or no elements: print
`[(n, p.shape) for n, p in model.named_parameters()]`. In the traceback, FSDP's `forward` doesn't appear above the
failing layer.

**The fix.** Call the FSDP module, or wrap the call in `with FullyShardedDataParallel.summon_full_params(model):`, on
every rank. Under FSDP2, see [crash-mixed-tensor-dtensor](crash-mixed-tensor-dtensor.py).

**What you see.**

    RuntimeError: 'weight' must be 2-D

**Also seen as**

- calling generate, encode or a layer of an FSDP1 model fails; it works with summon_full_params
- weights are flat, 1-D or empty; merging LoRA, or tying or reading weights fails under FSDP
- `'weight' must be 2-D`, `are out of bounds for storage of size 0`, `setStorage: sizes`,
  `mat2 must be a matrix, got 1-D tensor`, `is invalid for input of size`, `a Tensor with 0 elements`,
  `weight should have at least`, `running_mean should contain`, `size mismatch, got input`, `self must be a matrix`,
  `mat1 and mat2 shapes cannot be multiplied` (a run on the CPU)
- `The tensor has a non-zero number of elements` (torch's TensorImpl.h)
- `2D tensors expected, but got` (torch's LinearAlgebra.cpp)
- `which has 0 elements` (torch/nn/functional.py)
- `expected weight to be at least` (torch's Convolution.cpp)
- `storage has wrong byte size` (torch's serialization.cpp)
- `tensor should have ND shape but has 1D shape` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model, tokens = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)), torch.arange(4)
right = model[0](tokens)
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

features = model.module[0](tokens)  # broken
# fixed: with FullyShardedDataParallel.summon_full_params(model):
# fixed:     features = model.module[0](tokens)
torch.testing.assert_close(features, right)
dist.destroy_process_group()
