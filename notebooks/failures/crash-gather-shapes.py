"""# all_gather with tensors of different shapes

**Why.** A collective doesn't send shapes, so every rank has to pass a tensor of the same shape and dtype. The shapes
differ if the last batch is smaller, or if texts or lists of boxes have different lengths.

**How to tell.** Print `tensor.shape, tensor.dtype` on every rank just before the call. gloo aborts the process that
receives too much. NCCL may not report anything: the numbers come back mixed up, or the call hangs.

**The fix.** All-gather the lengths, pad the tensors to the longest, all-gather them, and truncate. In Accelerate,
`pad_across_processes` does the padding. For Python objects of any size, use `dist.all_gather_object`.

**What you see.** gloo aborts the process that receives too much (signal 6, SIGABRT):

    terminate called after throwing an instance of 'gloo::EnforceNotMet'
    op.preamble.length <= op.nbytes. 6 vs 4. Received data size doesn't match expected size.

**Also seen as**

- gathering predictions hangs, fails or garbles them when the last batch is smaller or ranks have a different number of
  samples
- all_gather of variable-length tensors; pad before gathering
- `Received data size doesn't match expected size`
- `invalid tensor size at index` (a run on the CPU)
- `output tensor size must be equal to world_size times input tensor size` (torch's ProcessGroupNCCL.cpp)
- `Tensors must be contiguous`, `must be contiguous`, `must have the same number of elements` (torch's c10d)
- `Invalid usage of tensors with different dtypes` (torch/distributed/distributed_c10d.py)
- `All tensor operands to scatter/gather must have the same number of elements`,
  `tensor list operands to scatter/gather must have the same size as process group`, `wrong size output`,
  `expected to have size equal to first tensor` (an older PyTorch)
- `Impossible to apply the desired operation due to inadequate shapes`, `due to shape mismatches`,
  `` You can't use batches of different size with `dispatch_batches=True` `` (accelerate)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
predictions = torch.arange(5.0)
mine = predictions[:3] if rank == 0 else predictions[3:]  # the last batch is smaller

gathered = [torch.empty_like(mine) for _ in range(world_size)]  # broken
dist.all_gather(gathered, mine)  # broken
# fixed: lengths = [torch.tensor(0) for _ in range(world_size)]
# fixed: dist.all_gather(lengths, torch.tensor(len(mine)))
# fixed: longest = int(max(lengths))
# fixed: gathered = [torch.empty(longest) for _ in range(world_size)]
# fixed: dist.all_gather(gathered, torch.nn.functional.pad(mine, (0, longest - len(mine))))
# fixed: gathered = [part[:length] for part, length in zip(gathered, lengths, strict=True)]
assert torch.cat(gathered).equal(predictions)
dist.destroy_process_group()
