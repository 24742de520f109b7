"""# Memory grows with every batch of an evaluation

**Why.** Without `torch.no_grad()`, a forward pass keeps its activations for backward. If you add the loss tensor to a
running total, the total keeps every batch's graph alive, with all its tensors.

**How to tell.** `total.grad_fn` isn't None. Memory grows by the same amount with every batch, and runs out during
evaluation.

**The fix.** Put `with torch.no_grad():` around the evaluation loop, and write `total += loss.detach()` in training.

**What you see.**

    AssertionError: after the evaluation, 4 batches of activations are still in memory

**Also seen as**

- GPU memory increases with every iteration, by the same amount, until it runs out; a memory leak; in evaluation or
  validation, while training fits
- the loss, outputs or hidden states are accumulated, logged or kept in a list without detach() or item();
  torch.no_grad is missing
"""

import weakref

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
activations = weakref.WeakSet()  # those that something still holds
model[1].register_forward_hook(lambda module, inputs, output: activations.add(output.untyped_storage()))
batches = torch.randn(4, 2, 8)

total = torch.zeros(())
for batch in batches:
    total = total + model(batch).square().mean()  # broken
    # fixed: with torch.no_grad():
    # fixed:     total = total + model(batch).square().mean()
assert total > 0
assert len(activations) == 0, f"after the evaluation, {len(activations)} batches of activations are still in memory"
