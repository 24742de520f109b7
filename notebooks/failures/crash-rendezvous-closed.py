"""# RendezvousClosedError, or a node joins too late

**Why.** torchrun's agents, one a node, find each other under a rendezvous ID. Once a node has finished or failed, it
closes the rendezvous, so a node that restarts or arrives later can't join. A second job with an old job's ID and
address can't, either.

**How to tell.** The real error comes before this message, in the log of the node that left first.

**The fix.** Read the log of the node that failed first. Use a new ID for every job, such as `--rdzv-id=$SLURM_JOB_ID`.
If nodes start more than ten minutes apart, raise the join timeout (`--rdzv-conf=join_timeout=1800`). If you run several
jobs on one machine, start each with `--standalone` or `--rdzv-endpoint=localhost:0`.

**What you see.**

    rank 0 in `assert second.next_rendezvous().world_size == 1`
    torch.distributed.elastic.rendezvous.api.RendezvousClosedError

**Also seen as**

- some nodes finish and the last one fails in the rendezvous; max_restarts; the same rdzv_id
- `RendezvousClosedError`
- `RendezvousConnectionError` (a run on the CPU)
- `RendezvousGracefulExitError`, `RendezvousStateError`, `The rendezvous is closed`
  (torch/distributed/elastic/rendezvous/api.py)
"""

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
LIMITS = {"join_timeout": 60, "last_call_timeout": 1}


def agent(run_id):  # as torchrun --nnodes 1:2 --rdzv-id RUN_ID makes one
    parameters = RendezvousParameters("c10d", "localhost:0", run_id, min_nodes=1, max_nodes=2, **LIMITS)
    return create_handler(store, C10dRendezvousBackend(store, run_id), parameters)


first = agent("job-7")
first.next_rendezvous()
first.set_closed()  # it has finished

second = agent("job-7")  # broken
# fixed: second = agent("job-8")
assert second.next_rendezvous().world_size == 1
