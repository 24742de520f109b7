"""# Training fits in memory, but saving doesn't

**Why.** `full_state_dict=True` without `cpu_offload=True` gives every rank a full copy of the model and keeps it on the
GPU.

**How to tell.** All ranks run out of memory on the line that saves the model.

**The fix.** Save shards with `torch.distributed.checkpoint`, and consolidate the files later, in one process.

**What you see.**

    AssertionError: the state dict holds 360 bytes on rank 0; this rank's shards are 180

**Also seen as**

- out of memory after training has finished, in save_model
- OOM in save_pretrained or save_model after LoRA or full training that went well; save only the adapters
- `Failed to clone() tensor with name` (torch/distributed/fsdp/_state_dict_utils.py)
- `1EB memory` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))

state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # broken
# fixed: state = get_model_state_dict(model)
held = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in state.values())
shards = whole_bytes // world_size
assert held == shards, f"the state dict holds {held} bytes on rank {rank}; this rank's shards are {shards}"
dist.destroy_process_group()
