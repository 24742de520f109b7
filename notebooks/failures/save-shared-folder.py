"""# Half of the checkpoint files are on a different node

**Why.** In a sharded save, each rank writes its own files, and rank 0 also writes `.metadata`. With local disks, each
node ends up with only its own ranks' files. On a network disk, new files and folders may show up late on other nodes.

**How to tell.** List the folder on each node. The *No such file* error names a file that another rank wrote. The same
run works on a single node.

**The fix.** Save to a disk that all nodes share. Call `os.makedirs(folder, exist_ok=True)` on every rank, and
`dist.barrier()` before reading. If you use the HF Trainer with local disks, set `save_on_each_node=True`.

**What you see.** Rank 1 looks for a file that rank 0 wrote, on its own disk:

    CheckpointException: CheckpointException ranks:dict_keys([1])
    FileNotFoundError: [Errno 2] No such file or directory: 'disk-of-node-1/.metadata'

**Also seen as**

- on several nodes, a checkpoint is incomplete, or resuming fails on all nodes but the first; no shared file system
- a file or folder that exists isn't found on some ranks; NFS, Lustre, a stale handle
- `OSError: [Errno 116] Stale file handle` (a run on the CPU)
- `` you should activate `--save_on_each_node` ``, `Could not locate the best model at` (transformers)
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Linear(8, 2)
right = model.weight.detach().clone()
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

folder = f"disk-of-node-{dist.get_rank()}"  # broken: as if each rank were on a node of its own
# fixed: folder = "disk-of-all-nodes"
dcp.save(get_model_state_dict(model), checkpoint_id=folder)

nn.init.zeros_(model.weight)
dcp.load(get_model_state_dict(model), checkpoint_id=folder)
torch.testing.assert_close(model.weight.full_tensor(), right)
dist.destroy_process_group()
