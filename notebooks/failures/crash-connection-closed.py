"""# The rank that raises the error is the healthy one

**Why.** Rank 1 has fewer batches, so it finishes first and exits. Rank 0 then finds its connection closed, and its
traceback points at an innocent all-reduce.

**How to tell.** The message is about a connection, not about your code. Look at the *other* ranks: which one exited
first, and with what exit status?

**The fix.** Have all ranks agree on the number of steps before the loop. Here, all ranks use the smallest number. If
the other rank didn't finish but failed, its own error is the one to fix.

**What you see.** Which of two ways rank 0 finds out, "closed by peer" or "reset by peer", varies:

    rank 0 in `dist.all_reduce(total)`
    This is typically caused by a remote worker

**Also seen as**

- a healthy rank fails with a message about a connection, in the middle of training; the real error is on a different
  rank
- one node or pod was preempted, rebooted or killed, and the rest fail with a network error
- `Connection closed by peer`, `This is typically caused by a remote worker`, `Connection reset by peer`
- `Broken pipe`, `failed to recv, got 0 bytes`, `Connection was likely closed. Did the remote server shutdown or
  crash?`, `sendBytes failed on SocketImpl`, `ConnectionResetError: [Errno 104] Connection reset by peer`,
  `BrokenPipeError: [Errno 32] Broken pipe`, `ConnectionRefusedError: [Errno 111] Connection refused` (a run on the
  CPU)
- `torch.distributed.DistBackendError` (torch's Exceptions)
- `Stop_waiting response is expected`, `ECONNRESET` (torch's TCPStore.cpp)
- `ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely`,
  `ncclRemoteError` (torch's NCCLUtils.cpp)
- `This may indicate a possible application crash on rank 0 or a network set up issue`,
  `NCCL communicator was aborted`, `Failed to get timeout rank ID from TCPStore` (torch's ProcessGroupNCCL.cpp)
- `recvValue failed on SocketImpl`, `Failed to check the "should dump" flag on TCPStore`, `Interrupted system call`
  (an older PyTorch)
- `Connection closed by remote peer`, `socketProgressOpt: Call to recv from`, `failed : Connection reset by peer`,
  `socketProgress: Connection closed by remote peer`, `remote process exited or there was a network error`,
  `NCCL error: remote process exited` (NCCL)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
batches = [torch.ones(4)] * (3 if rank == 0 else 2)  # an uneven split

num_steps = torch.tensor(len(batches))
# fixed: dist.all_reduce(num_steps, op=dist.ReduceOp.MIN)
# fixed: for batch in batches[:num_steps]:
for batch in batches:  # broken
    total = batch.sum()
    dist.all_reduce(total)
dist.destroy_process_group()
assert total == 4 * world_size, f"the last total is {total}"
