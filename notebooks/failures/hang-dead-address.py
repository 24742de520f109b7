"""# The client socket has timed out while trying to connect

**Why.** A rank looks for the others at `MASTER_ADDR` and `MASTER_PORT`. Maybe these variables are left over from a
different job, rank 0 hasn't started or has failed, or the name resolves to a machine that doesn't answer. If the
address is `localhost` on every node, each node waits for itself.

**How to tell.** The message contains the address and the port. Check whether rank 0 is running there, and whether
`env | grep -E 'RANK|WORLD_SIZE|MASTER'` shows variables of an earlier job.

**The fix.** Run `unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`. On one machine, use `torchrun --standalone`. On
several machines, give them all the same `--rdzv-endpoint=HOST:PORT`.

**What you see.** With a limit of two seconds instead of torchrun's minute, or the ten to thirty minutes of a group:

    rank 0 in `store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))`
    DistNetworkError: The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 40001).

**Also seen as**

- init_process_group never returns: it hangs at the start, before any rank prints its first line; the master isn't
  ready, or its service name doesn't resolve yet (Kubernetes)
- multi-node jobs hang at startup: each node waits for the others at localhost; main_process_ip, machine_rank,
  NODE_RANK
- `The client socket has timed out after 2000ms while trying to connect to`
- `The IPv6 network addresses of`, `cannot be retrieved (gai error: -2 - Name or service not known)`,
  `failed to connect/validate to host`, `RendezvousTimeoutError`, `DistNetworkError`, `DistStoreError`,
  `Timed out after 61 seconds waiting for clients`, `torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError`,
  `RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details`,
  `gai error: -2`, `Name or service not known`, `The client socket has timed out after 60000ms while trying to connect
  to` (a run on the CPU)
- `The hostname of the client socket cannot be retrieved`, `The client socket has failed to connect to`,
  `gai error: -3` (torch's socket.cpp)
- `The server socket on`, `is not yet listening` (torch's TCPStore.cpp)
- `The hostname of the rendezvous endpoint` (torch/distributed/elastic/rendezvous/utils.py)
- `endpoint is absent in RendezvousParameters`, `rank is absent in RendezvousParameters`, `Port is absent in endpoint`
  (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py)
- `The client socket has timed out after 60s while trying to connect to`, `failed to connect to TCPStore` (an older
  PyTorch)
- `Temporary failure in name resolution` (the C library)
- `` but `MASTER_ADDR` env was not set `` (accelerate)
"""

import socket
from datetime import timedelta

import torch.distributed as dist

with socket.create_server(("127.0.0.1", 0)) as ended:  # yesterday's job
    old_port = ended.getsockname()[1]
master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # today's
port = old_port  # broken: MASTER_PORT is left over from that job
# fixed: port = master.port
store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
master.set("step", "1")
assert store.get("step") == b"1"
