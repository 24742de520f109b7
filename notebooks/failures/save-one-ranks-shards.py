"""# The saved file is too small and doesn't load: size mismatch

**Why.** On each rank, a sharded model's tensors are that rank's shards, so a file written on rank 0 contains only
rank 0's shard of each tensor. With FSDP1 and ZeRO-3, the tensors are even empty (`torch.Size([0])`) unless they've
been unsharded.

**How to tell.** The file is 1/N as large as the model, or only a few hundred kB. The message contains *copying a
param with shape*, and the first dimension of that shape is a fraction of the right size, or 0.

**The fix.** Unshard the tensors on every rank, then write the file on rank 0: with `shard.full_tensor()`, as here,
or, for a large model, with `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True,
cpu_offload=True))`, which keeps them in rank 0's host memory. Or save shards with `dcp.save`, and consolidate them
later.

**What you see.**

    RuntimeError: Error(s) in loading state_dict for Linear:
    size mismatch for weight: copying a param with shape torch.Size([4, 8]) from checkpoint, the shape in current model

**Also seen as**

- the saved model is incomplete, 1/N of its size or a few kB: the state dict contains only part of the parameters
  after FSDP or ZeRO-3
- tensors in the saved file are empty (torch.Size([0])) or flat; adapter_model.safetensors or pytorch_model.bin is
  nearly empty; LoRA
- `size mismatch for`, `copying a param with shape`, `from checkpoint, the shape in current model is`
- `torch.Size([0]) from checkpoint`, `shape torch.Size([0])` (a run on the CPU)
- `must be imported to load DTensors` (a run on the CPU: the file was written by `torch.save(model.state_dict(), ...)`)
- `ignore_mismatched_sizes=True` (transformers)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 8)
right = model.weight.sum().item()
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

state = {name: shard.to_local() for name, shard in model.state_dict().items()}  # broken
# fixed: state = {name: shard.full_tensor() for name, shard in model.state_dict().items()}
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
    plain = nn.Linear(8, 8)
    plain.load_state_dict(torch.load("model.pt"))
    assert plain.weight.sum().item() == right
dist.destroy_process_group()
