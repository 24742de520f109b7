"""# The schedule runs N times too fast or too slow

**Why.** In every training step, accelerate's scheduler steps once per process, as if the data weren't split across
ranks. So a schedule computed from the sharded loader's length ends after 1/N of the training. With accumulation,
stepping the scheduler once per micro-batch has the same effect.

**How to tell.** Print the learning rate over an epoch, with one rank and with two. The number of steps per epoch is
`len(loader)` *after* `prepare`.

**The fix.** Create the schedule with `num_training_steps * accelerator.num_processes`, keep the scheduler out of
`prepare`, or use `Accelerator(step_scheduler_with_optimizer=False)`. Step the scheduler only when the optimizer
steps.

**What you see.**

    AssertionError: halfway through training, the learning rate is 0.000 instead of 0.050

**Also seen as**

- warmup ends early, the learning rate reaches zero too soon, or the cosine repeats
- scheduler.step is called per process, per micro-batch or per epoch by mistake
- `` Detected call of `lr_scheduler.step()` before `optimizer.step()` `` (a run on the CPU)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model, images = fully_shard(nn.Linear(8, 2), mesh=mesh), torch.randn(8, 8)
num_steps, micro_batches = 4, 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)  # to 0 after the last step

for _ in range(num_steps // 2):
    for batch in images.chunk(micro_batches):
        model(batch).square().mean().backward()
        optimizer.step()  # broken: once per micro-batch
        schedule.step()  # broken
    # fixed: optimizer.step()
    # fixed: schedule.step()
    optimizer.zero_grad()
rate = schedule.get_last_lr()[0]
assert abs(rate - 0.05) < 1e-6, f"halfway through training, the learning rate is {rate:.3f} instead of 0.050"
dist.destroy_process_group()
