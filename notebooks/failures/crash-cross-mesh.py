"""# Clipping or the optimizer combines DTensors on two meshes

**Why.** With FSDP and a second dimension (`tp`, `ep`), some parameters are on a one-dimensional mesh and others are on
a two-dimensional mesh. Clipping stacks the norms of all gradients, and in older versions, DTensor also rejects the
optimizers' foreach and fused kernels, which take all parameters in one call.

**How to tell.** `{getattr(p, 'device_mesh', None) for p in model.parameters()}` contains more than one mesh. (If it
contains None, plain tensors are mixed in, and the message is *got mixed torch.Tensor and DTensor*.)

**The fix.** Use one parameter group or one optimizer per mesh, or pass `foreach=False, fused=False`. To clip, call
`torch.nn.utils.get_total_norm` on each mesh's gradients and then on the resulting norms, and call
`clip_grads_with_norm_(group, max_norm, norm)` for each mesh.

**What you see.**

    rank 0 in `norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # broken`
    RuntimeError: All operands in aten.stack.default must have the same mesh, but got DeviceMesh((dp=2)

**Also seen as**

- optimizer.step() or clip_grad_norm_ fails with FSDP and tensor parallelism (tp, ep): parameters on different meshes
- `must have the same mesh, but got DeviceMesh`
- `DTensor does not support cross-mesh operation yet` (an older PyTorch; pytorch PR #134551)
- `Could not run pointwise computation across different mesh` (an older PyTorch; pytorch PR #153268)
- `aten._foreach_mul_.Scalar` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
model(images).square().mean().backward()
right = nn.utils.get_total_norm([p.grad for p in model.parameters()])
model.zero_grad()

parallelize_module(model[0], mesh["tp"], ColwiseParallel())  # its parameters are on both dimensions
fully_shard(model, mesh=mesh["dp"])  # and all others on one
model(images).square().mean().backward()

norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # broken
# fixed: by_mesh = {}
# fixed: for parameter in model.parameters():
# fixed:     by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
# fixed: groups = by_mesh.values()
# fixed: norms = [nn.utils.get_total_norm([p.grad for p in group]).full_tensor() for group in groups]
# fixed: norm = nn.utils.get_total_norm(norms)
# fixed: for group in groups:
# fixed:     nn.utils.clip_grads_with_norm_(group, 1.0, norm)
torch.testing.assert_close(norm, right)
dist.destroy_process_group()
