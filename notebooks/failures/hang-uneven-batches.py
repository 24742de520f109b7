"""# The evaluation of a sharded model never ends

**Why.** With five images on two ranks, rank 0 has one more batch than rank 1. Each forward pass all-gathers every unit,
so rank 0 waits in an all-gather while rank 1 is already in the final all-reduce. The same loop works under DDP, whose
forward pass needs no collective here.

**How to tell.** One rank waits inside the model, and the other waits after the loop. Count the batches on each rank.

**The fix.** Give every rank the same number of batches, even if some of the batches are empty. An empty batch still
runs the all-gathers.

**What you see.** With a limit of two seconds for the model's group instead of half an hour:

    rank 0 in `total = sum(model(image[None]).sum() for image in mine)  # broken`
    RuntimeError: [unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete

**Also seen as**

- training freezes or gets stuck after the first epoch, before or after validation, with no error
- training randomly stops or hangs: uneven batches, a different number of batches or samples on each rank; generate with
  texts of different lengths; synced_gpus
- `Timed out waiting 1800000ms for send operation to complete`,
  `Timed out waiting 1800000ms for recv operation to complete`
- `Detected uneven workload distribution`, `uneven number of batches` (Lightning, CosyVoice, fairseq)
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
impatient = dist.new_group(timeout=timedelta(seconds=2))  # all ranks have met by now
mesh = DeviceMesh.from_group(impatient, "cpu")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
images = torch.randn(5, 8)
right = model(images).sum().item()
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)

with torch.no_grad():
    mine = images[rank::world_size]  # broken: three images on rank 0, two on rank 1
    total = sum(model(image[None]).sum() for image in mine)  # broken
    # fixed: batches = [batch.tensor_split(world_size)[rank] for batch in images.split(world_size)]
    # fixed: total = sum(model(batch).sum() for batch in batches)
dist.all_reduce(total)
torch.testing.assert_close(total.item(), right, rtol=1e-5, atol=0)
dist.destroy_process_group()
