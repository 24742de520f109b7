"""# The server socket has failed to listen: address already in use

**Why.** A fixed port such as 29500 belongs to whichever process opens it first. That may be someone else's run, or a
leftover process of yours.

**How to tell.** The error names the port. `ss -ltnp | grep PORT` shows the process that uses it.

**The fix.** Let the system choose a free port: use port 0, `torchrun --standalone`, or `--rdzv-endpoint=localhost:0`.

**What you see.**

    rank 0 in `store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)`
    The server socket has failed to listen on any local network address
    EADDRINUSE

**Also seen as**

- a second job on the same machine doesn't start: several torchrun jobs share the default master port 29500
- can't start again right after a crash or Ctrl-C: a leftover process still has the port
- `The server socket has failed to listen on any local network address`, `EADDRINUSE`, `address already in use`
- `EADDRINUSE, message: address already in use`, `port: 29500, useIpv6`, `code: -98, name: EADDRINUSE`,
  `OSError: [Errno 98] Address already in use` (a run on the CPU)
- `The server socket has failed to bind to` (torch's socket.cpp)
- `has failed to shutdown the rendezvous` (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py)
- `errno: 98 - Address already in use`, `EADDRINUSE (address already in use)` (an older PyTorch)
- `Tried to launch distributed communication on port`, `but another process is utilizing it` (accelerate)
"""

import socket

import torch.distributed as dist

with socket.create_server(("127.0.0.1", 0)) as neighbor:  # someone else's run
    port = neighbor.getsockname()[1]  # broken: as if both runs had been given the same number
    # fixed: port = 0  # the system chooses a free one
    store = dist.TCPStore("127.0.0.1", port, world_size=1, is_master=True)
    assert store.port != neighbor.getsockname()[1]
store.set("step", "1")
assert store.get("step") == b"1"
