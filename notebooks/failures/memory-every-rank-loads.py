"""# The host runs out of memory while the model is loaded

**Why.** Each rank reads the full model before it keeps its shard, so eight ranks on one machine need host memory for
eight models. Linux then kills one of the processes, which can no longer print a message.

**How to tell.** torchrun reports exit code -9, and `dmesg` reports that a process ran out of memory. The kill comes
before the first step.

**The fix.** Read the weights only on rank 0, build the model on the meta device on all other ranks, and call
`set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))`. Or
load shards with `dcp.load`.

**What you see.**

    AssertionError: the ranks read 720 bytes into host memory; the model has 360

**Also seen as**

- all processes load the full model: CPU RAM grows to the number of GPUs times its size, until SIGKILL, -9 before the
  first step (LLaMA 70B onto 8 GPUs on a node)
- the pod is OOMKilled while loading; from_pretrained on all ranks; low_cpu_mem_usage; cpu_ram_efficient_loading
- `failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary`, `Signal 9 (SIGKILL) received by PID`,
  `failed (exitcode: -9)`, `Signal 9 (SIGKILL)`, `exitcode : -9`, `died with <Signals.SIGKILL: 9>`, `exit code 137`,
  `Exit Code: 137`, `exit code -9` (a run on the CPU)
- `OOMKilled`, `Out of memory: Killed process`, `OutOfMemoryError: Task was killed`, `oom-killer` (Kubernetes, Docker,
  the kernel)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
model_bytes = sum(parameter.nbytes for parameter in model.parameters())
right = model(torch.ones(8)).sum().item()
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
nn.init.zeros_(model[0].weight)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

weights = torch.load("model.pt")  # broken
# fixed: weights = torch.load("model.pt") if rank == 0 else {}
read = torch.tensor(sum(weight.nbytes for weight in weights.values()))
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, weights, options=options)
dist.all_reduce(read)
torch.testing.assert_close(model(torch.ones(8)).sum().item(), right)
assert read == model_bytes, f"the ranks read {read} bytes into host memory; the model has {model_bytes}"
dist.destroy_process_group()
