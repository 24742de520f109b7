"""# After resuming, the loss jumps up

**Why.** `dcp.load` fills the tensors that you pass. A new Adam optimizer doesn't have any moments yet, so
`optimizer.state_dict()` has nothing to fill, and the saved moments stay in the file. No error is raised.

**How to tell.** After loading, `optimizer.state` is empty until the first step.

**The fix.** Use `get_state_dict` and `set_state_dict`, which create the moments and key them by parameter name.

**What you see.** The losses of the steps after the resume:

    AssertionError: the losses are [0.0072, 0.0763, 0.0107] instead of [0.0072, 0.0086, 0.0093]

**Also seen as**

- the loss jumps up after a resume, and needs many steps to come back; the optimizer's state is not restored
- loading the optimizer under FSDP fails or is ignored: parameter ids, rekey, exp_avg has the wrong shape, another
  number of GPUs
- `that doesn't match the size of optimizer's group`, `loaded state dict contains a parameter group that doesn't match
  the size of optimizer's group`, `loaded state dict has a different number of parameter groups`,
  `must match the size of tensor b`, `must match the existing size`, `at non-singleton dimension 0` (a run on the CPU)
- `is not in the optimizer state`, `Differing optimizer state names for the unflattened parameters`,
  `Tensor optimizer state does not have same shape as its parameter`, `must have positive-dimension tensor state`,
  `must have scalar state with the same value and dtype`,
  `All unflattened parameters comprising a single flat parameter` (torch/distributed/fsdp/_optim_utils.py)
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
images = torch.randn(8, 8)


def new_run(sharded=True):
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    if sharded:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer, num_steps):
    losses = []
    for _ in range(num_steps):
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 4))
    return losses


def state_of(model, optimizer):
    states = state_dict.get_model_state_dict(model), optimizer.state_dict()  # broken
    # fixed: states = state_dict.get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), states, strict=True))


right = train(*new_run(sharded=False), 23)[20:]  # without a stop
model, optimizer = new_run()
train(model, optimizer, 20)
dcp.save(state_of(model, optimizer), checkpoint_id="checkpoint")

model, optimizer = new_run()
state = state_of(model, optimizer)
dcp.load(state, checkpoint_id="checkpoint")
state_dict.set_model_state_dict(model, state["model"])
optimizer.load_state_dict(state["optimizer"])  # broken: the moments are still in the file
# fixed: state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"])
losses = train(model, optimizer, 3)
assert losses == right, f"the losses are {losses} instead of {right}"
dist.destroy_process_group()
