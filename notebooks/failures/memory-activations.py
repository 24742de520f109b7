"""# Out of memory in the first steps, even though everything is sharded

**Why.** Sharding divides the parameters, the gradients and the optimizer state, but nothing else. Activations grow
with the batch size and the sequence length, and logits grow with the vocabulary. Each unit is all-gathered in full
on every rank, and Adam's state isn't allocated until the first step.

**How to tell.** Halve the per-rank batch size, and see whether the step fits. Print
`torch.cuda.max_memory_allocated()` after forward, after backward and after the optimizer step, to see where the
peak occurs.

**The fix.** Use activation checkpointing for each block, a smaller micro-batch with accumulation, a loss computed
in chunks, or `CPUOffloadPolicy`. `python -m fsdp_helpers plan` adds up the memory beforehand.

**What you see.**

    AssertionError: 26368 bytes wait for backward; the blocks' inputs have 8192

**Also seen as**

- still runs out of memory with a batch size of 1; OOM on 8 GPUs when fine-tuning a 7B model
- OOM error in the middle of training
- `CUDA out of memory. Tried to allocate`, `total capacity`, `CUDA out of memory` (torch's CUDACachingAllocator.cpp)
- `torch.OutOfMemoryError`, `OutOfMemoryError` (torch's Exceptions)
- `CUBLAS_STATUS_ALLOC_FAILED` (torch's CUDABlas.cpp)
- `torch.cuda.OutOfMemoryError`, `HIP out of memory` (an older PyTorch)
- `CUDNN_STATUS_ALLOC_FAILED` (cuDNN)
- `CUDA error: out of memory` (CUDA)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)]
for block in blocks:
    fully_shard(block, mesh=mesh)
hidden, saved = torch.randn(64, 8), []
most = 4 * hidden.nbytes  # the blocks' inputs


def note(tensor):
    saved.append(tensor.nbytes)
    return tensor


with saved_tensors_hooks(note, lambda tensor: tensor):  # everything that autograd saves for backward
    for block in blocks:
        hidden = block(hidden)  # broken: what every layer needs in backward is kept until then
        # fixed: hidden = checkpoint(block, hidden, use_reentrant=False)
    hidden.mean().backward()
assert sum(saved) <= most, f"{sum(saved)} bytes wait for backward; the blocks' inputs have {most}"
dist.destroy_process_group()
