"""# A rank is not part of the group

**Why.** In a smaller group, `src` and `dst` are still *global* ranks: `broadcast(t, src=0, group=g)` on a group of
ranks 4 to 7 names a rank outside the group. And a rank that isn't a member gets only a placeholder from `new_group`,
which can't communicate.

**How to tell.** `dist.get_process_group_ranks(group)` doesn't contain the rank named in the call, or the rank making
the call.

**The fix.** Use `dist.broadcast(t, group=group, group_src=0)`, or `src=dist.get_global_rank(group, 0)`. Put
`if dist.get_rank(group) >= 0:` around any calls that only members should make.

**What you see.**

    rank 1 in `dist.broadcast(value, src=0, group=last)  # broken`
    ValueError: Global rank 0 is not part of group <torch.distributed.distributed_c10d.ProcessGroup object at

**Also seen as**

- broadcast, scatter, send or recv with the wrong src in a sub-group; tensor-parallel or node-local groups
- `is not part of group`
- `which does not belong to the given group` (a run on the CPU)
- `was not included in process group` (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)
- `is not part of the group` (torch/distributed/distributed_c10d.py)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
last = dist.new_group([world_size - 1])
value = torch.tensor([rank])
if dist.get_rank(last) >= 0:  # only members
    dist.broadcast(value, src=0, group=last)  # broken
    # fixed: dist.broadcast(value, group_src=0, group=last)
assert value == rank
dist.barrier()  # before rank 0, which has nothing to do, closes connections that rank 1 is still making
dist.destroy_process_group()
