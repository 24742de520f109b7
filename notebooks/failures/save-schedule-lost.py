"""# After resuming, the learning rate starts over

**Why.** The schedule has its own step counter. If that counter isn't saved, the next job starts the warmup or the
decay over.

**How to tell.** Log the learning rate in every step: it jumps where the job was resumed.

**The fix.** Save `schedule.state_dict()` together with the optimizer state.

**What you see.**

    AssertionError: after three steps, the learning rate is 0.2 instead of 0.05

**Also seen as**

- the learning rate starts over, or the warmup starts again, after resuming; lr_scheduler state isn't saved;
  last_epoch
"""

import torch
from torch.optim.lr_scheduler import LambdaLR


def new_run():
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.4)
    return optimizer, LambdaLR(optimizer, lambda step: 0.5**step)


def train(optimizer, schedule, num_steps):
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[0]["lr"]


right = train(*new_run(), 3)  # without a stop

optimizer, schedule = new_run()
train(optimizer, schedule, 2)
saved = {"optimizer": optimizer.state_dict()}  # broken
# fixed: saved = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}

optimizer, schedule = new_run()
optimizer.load_state_dict(saved["optimizer"])
# fixed: schedule.load_state_dict(saved["schedule"])
rate = train(optimizer, schedule, 1)
assert rate == right, f"after three steps, the learning rate is {rate} instead of {right}"
