"""# NaN from a batch in which every label is ignored

**Why.** A mean over no labels is 0/0. If one rank's micro-batch has only labels of -100 (a prompt, padding, a cut-off
answer), its loss is NaN. `cross_entropy` gives that rank a gradient of 0, so the mean over the ranks is too small, here
by half. If you use your own mask, `(loss * mask).sum() / mask.sum()`, every rank's gradients become NaN.

**How to tell.** `(labels != -100).sum()` is 0 on one rank. The NaN loss appears at random steps, even in bf16 and fp32.

**The fix.** Divide by the number of all ranks' labels: call `dist.all_reduce(num_labels)`, and then
`(loss_sum * world_size / num_labels.clamp(min=1)).backward()`. Or filter out samples without labels.

**What you see.**

    AssertionError: the loss and the norm of the gradient are nan and 0.401 instead of 0.773 and 0.802

**Also seen as**

- the loss is NaN for some batches only: all labels are -100 or ignore_index
- nn.CrossEntropyLoss returns NaN when all the targets are ignored
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model, tokens, labels = nn.Linear(8, 2), torch.randn(8, 8), torch.tensor([0, 1, 1, 0, -100, -100, -100, -100])
alone = copy.deepcopy(model)
loss_alone = cross_entropy(alone(tokens), labels)
loss_alone.backward()
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))

logits, labels = model(tokens.chunk(world_size)[rank]), labels.chunk(world_size)[rank]  # rank 1 has only a prompt
loss = cross_entropy(logits, labels)  # broken
# fixed: num_labels = (labels != -100).sum()
# fixed: dist.all_reduce(num_labels)
# fixed: loss = cross_entropy(logits, labels, reduction="sum") * world_size / num_labels.clamp(min=1)
loss.backward()
mean = loss.detach() / world_size
dist.all_reduce(mean)
norm, right = model.weight.grad.full_tensor().norm(), alone.weight.grad.norm()
seen, right = [f"{loss:.3f} and {norm:.3f}" for loss, norm in ((mean, norm), (loss_alone, right))]
assert seen == right, f"the loss and the norm of the gradient are {seen} instead of {right}"
dist.destroy_process_group()
