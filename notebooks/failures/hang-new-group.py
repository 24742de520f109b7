"""# Creating a smaller process group hangs

**Why.** All ranks have to call `new_group`, including those that won't be in the group, since groups are numbered in
the order in which they're made. Here, rank 0 makes a group for itself. Its next group is the second one, while for rank
1 it's the first, so the two wait for each other under different numbers. If a member of the group itself doesn't call
`new_group`, that call hangs already.

**How to tell.** A rank waits inside `new_group` or `init_device_mesh`, before any tensor has been sent. Count the calls
on each rank.

**The fix.** Call `new_group` on every rank, in the same order, or let `init_device_mesh` do that for you.

**What you see.** With a limit of two seconds for the group that hangs, instead of half an hour:

    rank 0 in `everyone = dist.new_group(timeout=timedelta(seconds=2))`
    torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//2//cpu//0/1

**Also seen as**

- hangs at the start, in new_group, split_group or a sub-group; only the members of the group call it
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")

if dist.get_rank() == 0:  # broken: the others won't be in this group
    writers = dist.new_group([0])  # broken
# fixed: writers = dist.new_group([0])
everyone = dist.new_group(timeout=timedelta(seconds=2))

members = torch.ones(1)
if dist.get_rank() == 0:
    dist.all_reduce(members, group=writers)
dist.all_reduce(members, group=everyone)
assert members == 2
dist.destroy_process_group()
