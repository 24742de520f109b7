"""# The loss depends on how texts are split among the ranks

**Why.** Each rank takes the mean over its own tokens, and the ranks' gradients are averaged. A token counts for more if
its rank has fewer tokens. Here, one rank has six tokens and the other has two.

**How to tell.** Compare the first step's gradient with the one that a single process computes from all the tokens.

**The fix.** Divide by the number of all tokens: call `dist.all_reduce(num_tokens)`, and then
`(loss_sum * world_size / num_tokens).backward()`. (FSDP and DDP divide by the number of ranks.)

**What you see.**

    AssertionError: the norm of the gradient is 1.164 instead of 1.215

**Also seen as**

- the loss or the gradient depends on how tokens are split among the ranks
- fine-tuning results depend on the number of GPUs
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, tokens = nn.Linear(8, 2), torch.randn(8, 8)
alone = copy.deepcopy(model)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))

mine = tokens[:6] if rank == 0 else tokens[6:]
losses = model(mine).square().mean(dim=1)  # one per token
loss = losses.mean()  # broken
# fixed: num_tokens = torch.tensor(len(mine))
# fixed: dist.all_reduce(num_tokens)
# fixed: loss = losses.sum() * world_size / num_tokens
loss.backward()
alone(tokens).square().mean().backward()
norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
right = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
assert abs(norm / right - 1) < 1e-5, f"the norm of the gradient is {norm:.3f} instead of {right:.3f}"
dist.destroy_process_group()
