"""# One rank skips a batch, and a process is aborted

**Why.** Rank 1 skips the step whose loss is NaN, so its next all-gather is matched with the reduction of rank 0's
gradients. gloo receives more bytes than it expects, and its C++ code aborts the process. NCCL would hang or mix up the
numbers instead.

**How to tell.** The aborted rank's last line is *Received data size doesn't match expected size*, which means that two
ranks are in different collectives. `TORCH_DISTRIBUTED_DEBUG=DETAIL` names both.

**The fix.** Make the decision together: all-reduce a flag, and skip the step on all ranks or on none.

**What you see.** gloo aborts the rank that receives too much (signal 6, SIGABRT):

    terminate called after throwing an instance of 'gloo::EnforceNotMet'
    op.preamble.length <= op.nbytes. 72 vs 18. Received data size doesn't match expected size.

**Also seen as**

- one rank skips a batch, backward or the optimizer's step (a NaN loss, an empty batch, out of memory, a caught
  exception) and goes on
- `Received data size doesn't match expected size`, `Signal 6 (SIGABRT) received by PID`
- `Detected mismatch between collectives on ranks`, `Collectives differ in the following aspects`,
  `CollectiveFingerPrint`, `Tensor Tensor shapes` (a run on the CPU)
- `Invalid bytes received` (an older gloo)
- `Message truncated : received` (NCCL)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = dist.init_device_mesh("cpu", (world_size,))
model, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 8)
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)

num_steps = 0
for step in range(3):
    loss = model(images * (float("nan") if rank == 1 and step == 1 else 1.0)).sum()
    # fixed: is_good = loss.detach().isfinite().float()
    # fixed: dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
    # fixed: if not is_good:
    if not loss.isfinite():  # broken: on this rank alone
        continue
    loss.backward()
    num_steps += 1
assert num_steps == 2, f"{num_steps} steps on rank {rank}"
dist.destroy_process_group()
