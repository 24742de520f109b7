"""# Each rank uses a different learning rate

**Why.** A schedule starts from the optimizer's `initial_lr`, which is in the saved state. With
`broadcast_from_rank0`, only rank 0 gets this value, and the other ranks use the current learning rate instead. No
error is raised.

**How to tell.** Log the learning rate of every rank, not only rank 0's.

**The fix.** Create the optimizer, then the schedule, and load last: `schedule = LambdaLR(optimizer, ...)` comes
before `set_optimizer_state_dict`.

**What you see.** Rank 0's learning rate is right:

    AssertionError: the learning rate on rank 1 is 0.00083 instead of 0.00250

**Also seen as**

- each rank has a different learning rate after a resume or a move from DDP to FSDP
- learning rates differ between ranks; ReduceLROnPlateau with a local metric
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

dist.init_process_group("gloo")
rank = dist.get_rank()


def falling(optimizer):
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


model = nn.Linear(8, 2)  # the first run, on one process
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = falling(optimizer)
for _ in range(3):
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    schedule.step()
    if schedule.last_epoch == 2:
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
right = optimizer.param_groups[0]["lr"]

fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))  # the second run
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
# fixed: schedule = falling(optimizer)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_optimizer_state_dict(model, optimizer, saved if rank == 0 else {}, options=options)
schedule = falling(optimizer)  # broken
for _ in range(3):  # the two steps that are done, and one more
    schedule.step()
rate = optimizer.param_groups[0]["lr"]
assert rate == right, f"the learning rate on rank {rank} is {rate:.5f} instead of {right:.5f}"
dist.destroy_process_group()
