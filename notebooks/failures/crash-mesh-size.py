"""# The mesh's size doesn't match the number of ranks

**Why.** The product of the mesh's dimensions mustn't be larger than the world size, and should be equal to it: a
smaller mesh raises no error, but leaves ranks out. If you ask for a mesh of eight ranks and the job has only one, you
forgot torchrun.

**How to tell.** Print `dist.get_world_size()` and the mesh's shape.

**The fix.** Use `init_device_mesh('cuda', (world_size // tp, tp), mesh_dim_names=('dp', 'tp'))`, and start `world_size`
ranks with torchrun.

**What you see.**

    rank 0 in `mesh = dist.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))  # broken: for eight ranks`
    RuntimeError: Mesh should not be bigger than default world size 2, but found 8 ranks!

**Also seen as**

- the tensor parallel degree times the data parallel degree isn't the number of GPUs; world size isn't divisible
- device mesh: wrong shape, missing mesh_dim_names, or a name that doesn't exist; hybrid sharding needs a 2-D mesh
- `Mesh should not be bigger than default world size`
- `Cannot slice a DeviceMesh without mesh_dim_names`, `Invalid mesh_dim_name`, `Valid mesh_dim_names are`,
  `expects a 1D or 2D DeviceMesh`, `Expected device_mesh to have ndim=2 but got`,
  `Please init the 2D mesh for HSDP with mesh_dim_names specified`, `should be less or equal to the world size` (a run
  on the CPU)
- `Invalid parallel dims: dp_replicate`, `WORLD_SIZE(8)` (torchtitan)
- `Available mesh dimensions are` (torch/distributed/device_mesh.py)
- `must be divisible by 'group_size` (torch/distributed/distributed_c10d.py)
- `does not match num_processes` (accelerate)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world_size, tp = dist.get_world_size(), 2
mesh = dist.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))  # broken: for eight ranks
# fixed: mesh = dist.init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
total = torch.ones(1)
dist.all_reduce(total, group=mesh.get_group("tp"))
assert total == tp
dist.destroy_process_group()
