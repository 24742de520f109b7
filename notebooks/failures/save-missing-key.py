"""# Missing key in checkpoint state_dict

**Why.** `dcp.load` needs every entry of the dictionary that it fills. The checkpoint either has the entry under a
different name (by number, with a prefix, nested differently) or doesn't have the entry at all. For example, Adam has
no moments for a parameter that hasn't had a gradient yet, such as a head that's used later, but a new optimizer asks
for those moments.

**How to tell.** `sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)` lists the names in the
checkpoint.

**The fix.** Save and load with the same `get_state_dict(model, optimizer)`, and remove from the dictionary any
entries that aren't in the checkpoint. Then `set_state_dict` needs `strict=False`.

**What you see.**

    rank 0 in `dcp.load(state, checkpoint_id="checkpoint")`
    CheckpointException: CheckpointException ranks:dict_keys([0, 1])
    RuntimeError: Missing key in checkpoint state_dict: optimizer.state.late.weight.step.

**Also seen as**

- saving the optimizer succeeds, but loading it fails: step or exp_avg of a parameter that was frozen or unused is
  missing
- strict loading of a distributed checkpoint: a new layer or a buffer isn't in it; allow_partial_load; FQN
- `Missing key in checkpoint state_dict`
- `Missing key in checkpoint state_dict: optimizer.state`, `KeyError: 'exp_avg'`, `KeyError: 'step'`,
  `KeyError: 'param_groups'` (a run on the CPU)
- `Could not find FQN`, `Key(s) present in other ranks but not this one` (torch/distributed/checkpoint/utils.py)
- `Missing optimizer state for parameter` (torch/distributed/checkpoint/state_dict.py)
- `Could not find checkpointable tensor shard` (torch/distributed/checkpoint/protocol.py)
- `Failed to validate global plan` (torch/distributed/checkpoint/default_planner.py)
- `KeyError: 'state'` (an older PyTorch)
"""

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))


def new_run():
    layers = OrderedDict(used=nn.Linear(8, 2), late=nn.Linear(2, 2))  # no loss reaches `late` yet
    model = fully_shard(nn.Sequential(layers), mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def state_to_fill(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


model, optimizer = new_run()
for parameter in model.used.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
dcp.save(state_to_fill(model, optimizer), checkpoint_id="checkpoint")

model, optimizer = new_run()
state, options = state_to_fill(model, optimizer), StateDictOptions()
options.strict = True  # broken: the default
# fixed: options.strict = False
# fixed: index = dcp.FileSystemReader("checkpoint").read_metadata().state_dict_metadata
# fixed: for name in list(state["optimizer"]["state"]):
# fixed:     if f"optimizer.state.{name}.step" not in index:
# fixed:         del state["optimizer"]["state"][name]
dcp.load(state, checkpoint_id="checkpoint")
states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
set_state_dict(model, optimizer, **states, options=options)
assert len(optimizer.state) == 2, f"{len(optimizer.state)} parameters have moments"
dist.destroy_process_group()
