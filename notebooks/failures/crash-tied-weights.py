"""# Parameter is shared with a parameter already managed by another FSDP group

**Why.** A language model's head often uses the embedding's weight, and one tensor can't belong to two units. FSDP1
fails later, with a shape mismatch. FSDP2 in PyTorch 2.11 doesn't raise an error.

**How to tell.** `model.head.weight is model.embedding.weight` is true before sharding.

**The fix.** Put both modules into one unit, `fully_shard([model.embedding, model.head])`, or leave both in the root.

**What you see.**

    rank 0 in `model(tokens).square().sum().backward()`
    ValueError: Parameter '1.weight' is shared with a parameter already managed by another FSDP group.

**Also seen as**

- a language model with tied embeddings can't be sharded: tie_word_embeddings, lm_head and embed_tokens
- tied weights are no longer tied after FSDP; the head and the embedding train separately
- `is shared with a parameter already managed by another FSDP group`
- `size mismatch, got input` (a run on the CPU)
- `For shared/tied parameters, use`, `managed by another FSDP group`
  (torch/distributed/fsdp/_fully_shard/_fsdp_state.py)
- `This is likely due to tied embeddings`, `Parameters missing after FSDP2 wrapping` (accelerate)

Needs: torch >= 2.12
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model, tokens = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)), torch.arange(8)
model[1].weight = model[0].weight
model(tokens).square().sum().backward()
right, model[0].weight.grad = model[0].weight.grad, None

units = [model[0], model[1]]  # broken
# fixed: units = [[model[0], model[1]]]
for unit in (*units, model):
    fully_shard(unit, mesh=mesh)
model(tokens).square().sum().backward()
torch.testing.assert_close(model[0].weight.grad.full_tensor(), right)
dist.destroy_process_group()
