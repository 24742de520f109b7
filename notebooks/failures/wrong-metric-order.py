"""# The log shows impossible numbers

**Why.** One rank runs two all-reduces of the same shape in the opposite order. The shapes match, so nothing hangs, and
one rank's loss is added to the other rank's image count. (If the shapes or the collectives differ, it
[hangs](hang-order.py).)

**How to tell.** A trace shows no mismatch, because the sizes agree. `dist.all_gather_object(orders, names)` shows that
the ranks' names are in different orders.

**The fix.** Reduce the metrics in the same order on every rank, or reduce them all as one tensor.

**What you see.**

    AssertionError: the sums are {'loss': 4.5, 'images': 4.5} instead of {'loss': 1.0, 'images': 8.0} on rank 0

**Also seen as**

- an accuracy above 1
- metrics are mixed up, larger than 100% or negative after an all-reduce
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
metrics = {"loss": torch.tensor(0.5), "images": torch.tensor(4.0)}
right = {"loss": 0.5 * world_size, "images": 4.0 * world_size}

names = ["loss", "images"] if rank == 0 else ["images", "loss"]  # as they came up in this rank's log
# fixed: names = sorted(names)
for name in names:
    dist.all_reduce(metrics[name])
sums = {name: metric.item() for name, metric in metrics.items()}
assert sums == right, f"the sums are {sums} instead of {right} on rank {rank}"
dist.destroy_process_group()
