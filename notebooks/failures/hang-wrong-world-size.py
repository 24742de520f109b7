"""# The group waits for ranks that never join

**Why.** The number of processes that were started isn't the world size, so those that are there wait for the rest: a
node is missing, `--nnodes` differs between machines, Slurm started one task instead of eight, or a second job's ranks
were counted as part of this one.

**How to tell.** *1/2 clients joined* means that ranks are missing. An older message has `worker_count` and `world_size`
instead: if `worker_count` is larger, two jobs share an address and port, or this job reuses an old `--rdzv-id` or file
store.

**The fix.** Start exactly nnodes × nproc-per-node processes, and pass the same two values on all machines. On Slurm,
use `srun --ntasks-per-node=1` in front of torchrun, or `--ntasks-per-node=8` without torchrun. Give each job its own
`--rdzv-id` and port.

**What you see.** With a limit of two seconds:

    rank 0 in `store = dist.TCPStore(HOST, port[0], num_processes, is_master=rank == 0, timeout=LIMIT)`
    torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 2/3 clients joined.

**Also seen as**

- the job waits forever for the other nodes or processes to join: nnodes, num_machines, num_processes, node_rank or
  ntasks doesn't match
- stuck at the start under Slurm: every process is global rank 0 or 1, MEMBER 1/4 appears twice; SLURM_PROCID,
  SLURM_NTASKS
- `seconds waiting for clients. 1/2 clients joined`, `clients joined`, `waiting for clients`
- `Timed out initializing process group in store based barrier on rank` (torch/distributed/distributed_c10d.py)
- `Waiting in store based barrier to initialize process group for rank`, `worker_count=`,
  `the number of ranks is inconsistent with` (an older PyTorch)
- `initializing ddp: GLOBAL_RANK: 1, MEMBER: 2/4`, `Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4`,
  `store_based_barrier_key:1 (world_size=2, worker_count=4, timeout=0:30:00)` (pytorch-lightning#6206)
- `but the number of tasks per node configured in SLURM`, `does not match with the number of tasks` (pytorch-lightning)
"""

import socket
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
HOST, LIMIT = "127.0.0.1", timedelta(seconds=2)
port = [0]
if rank == 0:
    with socket.create_server((HOST, 0)) as free:
        port = [free.getsockname()[1]]
dist.broadcast_object_list(port)

num_processes = 3  # broken: one more than were started
# fixed: num_processes = world_size
store = dist.TCPStore(HOST, port[0], num_processes, is_master=rank == 0, timeout=LIMIT)
store.add("joined", 1)
dist.barrier()
joined = store.add("joined", 0)
dist.barrier()  # before rank 0 closes the store
assert joined == world_size
dist.destroy_process_group()
