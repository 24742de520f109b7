"""# Each rank decides for itself when to stop or save

**Why.** With early stopping, *save if it's the best so far*, a time limit or a signal handler, each rank decides from
its own numbers, such as the loss on its validation images. `dist.reduce` doesn't help, because it gives the sum only to
rank 0. One rank leaves the loop or starts to save, while the others wait for it.

**How to tell.** The run hangs only now and then, after good epochs, and never if you save after every epoch. Print the
decision on each rank.

**The fix.** Call `dist.all_reduce(loss)` (not `reduce`) before the decision, or let rank 0 decide and send its decision
with `dist.broadcast`.

**What you see.** Rank 0 has stopped after two epochs. Rank 1 waits for it in the third, with a limit of two seconds
instead of half an hour:

    rank 1 in `model(images).sum().backward()  # an epoch`
    RuntimeError: [unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete

**Also seen as**

- early stopping hangs: the stop condition is met on one rank and not on the others; those that go on wait forever
- validation hangs in an all-gather on a rank whose part of the data is empty
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
impatient = dist.new_group(timeout=timedelta(seconds=2))  # all ranks have met by now
mesh = DeviceMesh.from_group(impatient, "cpu")

model, images = nn.Linear(8, 2), torch.randn(8, 8)
fully_shard(model, mesh=mesh)
losses = ([0.9, 0.4, 0.3], [0.9, 0.8, 0.3])  # rank by rank, on that rank's validation images, epoch by epoch
right = 1 + [sum(both) / 2 < 0.5 for both in zip(*losses, strict=True)].index(True)

epochs = 0
for loss in losses[rank]:
    model(images).sum().backward()  # an epoch
    epochs += 1
    # fixed: loss = torch.tensor(loss)
    # fixed: dist.all_reduce(loss)
    # fixed: loss /= world_size
    if loss < 0.5:
        break
dist.barrier()
assert epochs == right, f"{epochs} epochs on rank {rank} instead of {right}"
dist.destroy_process_group()
