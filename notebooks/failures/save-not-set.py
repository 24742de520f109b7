"""# dcp.load reads the checkpoint, but the model doesn't change

**Why.** `dcp.load` fills the dictionary that you pass. A sharded state dict shares its memory with the model. But a
full state dict, or a state dict on the CPU, is a copy, so loading into it doesn't change the model.

**How to tell.** A parameter's norm is the same before and after loading.

**The fix.** After `dcp.load(state, ...)`, call `set_model_state_dict(model, state, ...)`, and
`set_optimizer_state_dict` for the optimizer.

**What you see.**

    AssertionError: after loading, the weights' sum is 0.0 instead of 8.0

**Also seen as**

- dcp.load succeeds, but the model is unchanged
- dcp.load without set_state_dict: weights stay at their initial values, though the loaded state dict is correct
"""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
options = state_dict.StateDictOptions(full_state_dict=True)
model = nn.Linear(8, 1, bias=False)
fully_shard(model, mesh=mesh)
nn.init.ones_(model.weight)
dcp.save(state_dict.get_model_state_dict(model, options=options), checkpoint_id="checkpoint")

nn.init.zeros_(model.weight)  # the next run
state = state_dict.get_model_state_dict(model, options=options)
dcp.load(state, checkpoint_id="checkpoint")  # broken: it fills `state`, a copy, and the model stays as it is
# fixed: dcp.load(state, checkpoint_id="checkpoint")
# fixed: state_dict.set_model_state_dict(model, state, options=options)
total = model.weight.full_tensor().sum().item()
assert total == 8.0, f"after loading, the weights' sum is {total} instead of 8.0"
dist.destroy_process_group()
