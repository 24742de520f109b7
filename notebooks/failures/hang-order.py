"""# Two ranks wait in different collectives

**Why.** Collectives are matched by order, not by name or by tensor. A loop over a set, or over a dictionary that each
rank filled on its own, may run in a different order on each rank. Two collectives of the same kind and size are even
matched with each other, and the numbers are mixed up without an error: [wrong-metric-order](wrong-metric-order.py).

**How to tell.** All ranks wait, each in a different collective. `TORCH_DISTRIBUTED_DEBUG=DETAIL` names both. For any
hang, [notebook 11](../11_when_it_breaks.ipynb) asks where each rank is, and which collective differs.

**The fix.** Sort the names, so that every rank uses the same order.

**What you see.** With a limit of two seconds instead of half an hour, whichever rank gives up first:

    Timed out waiting 2000ms for

**Also seen as**

- each rank waits in a different collective; a dictionary, a set or os.listdir in a different order on each rank
- two threads or two process groups: overlapping collectives deadlock; a save in a background thread and training at the
  same time
- `Timed out waiting 1800000ms for recv operation to complete`,
  `Timed out waiting 1800000ms for send operation to complete`
- `is all-gathering parameters for`, `Forward order differs from that of the first iteration`
  (torch/distributed/fsdp/_exec_order_utils.py)
- `the order of collectives is not same for all ranks` (torch's ProcessGroupNCCL.cpp)
- `RankTimeout`, `ranks had not finished` (this series)
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
impatient = dist.new_group(timeout=timedelta(seconds=2))  # all ranks have met by now

loss, seen = torch.tensor([rank + 1.0]), [torch.zeros(2) for _ in range(world_size)]
collect = {
    "loss": lambda: dist.all_reduce(loss, group=impatient),
    "seen": lambda: dist.all_gather(seen, torch.ones(2), group=impatient),
}
names = ["loss", "seen"] if rank == 0 else ["seen", "loss"]  # as they came up in this rank's log
# fixed: names = sorted(names)
for name in names:
    collect[name]()
assert loss == 1 + 2, f"the sum of the losses is {loss.item()}"
dist.destroy_process_group()
