"""# Training stops as soon as rank 0 logs or saves

**Why.** `full_tensor()`, FSDP1's `summon_full_params`, and `get_model_state_dict` for a full state dict are
collectives: every rank has to contribute its shard. Inside `if rank == 0`, only rank 0 does. A forward pass of a
sharded model, as in an evaluation on rank 0, is also full of collectives.

**How to tell.** Rank 0 waits in `full_tensor()`, and the other ranks wait in whichever collective comes next. Search
for collectives inside `if rank == 0`.

**The fix.** Run the all-gather on every rank, but print or write the result on just one.

**What you see.** With a limit of two seconds for the model's group instead of half an hour:

    rank 0 in `norm = model[0].weight.full_tensor().norm()  # broken`
    RuntimeError: [unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete

**Also seen as**

- hangs when saving a checkpoint, when saving the model, or after validation; state_dict, save_model or save_pretrained
  on the main process only
- FSDP hangs at the beginning of the second epoch, after rank 0 alone has evaluated or saved; with DDP everything is
  fine
- `Timed out waiting 1800000ms for`
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
impatient = dist.new_group(timeout=timedelta(seconds=2))  # all ranks have met by now
mesh = DeviceMesh.from_group(impatient, "cpu")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
right = model[0].weight.norm()
fully_shard(model, mesh=mesh)

norm = torch.zeros(())
# fixed: norm = model[0].weight.full_tensor().norm()
if rank == 0:  # only this rank writes the log
    norm = model[0].weight.full_tensor().norm()  # broken
    print(f"the norm is {norm:.3f}")
dist.barrier()
torch.testing.assert_close(norm, right)
dist.destroy_process_group()
