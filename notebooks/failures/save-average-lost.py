"""# The averaged weights score well, but the saved file contains different weights

**Why.** The root unit stays unsharded after a forward pass, since a backward pass usually follows. In an evaluation,
no backward pass follows, so swapping in the averaged weights (EMA) changes the unsharded copy. The next forward pass
uses that copy, but saving reshards the unit and drops the copy.

**How to tell.** Before the swap, `next(model.parameters())` is a plain parameter, not a DTensor.

**The fix.** Call `model.reshard()` after every evaluation, and then swap the weights with `set_model_state_dict`.

**What you see.**

    AssertionError: the model that was saved gives -0.599 instead of -0.922

**Also seen as**

- EMA weights under FSDP are wrong, equal to the model's, or lost in the checkpoint; the saved file scores differently
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.set_grad_enabled(False)  # an evaluation
torch.manual_seed(0)
image, options = torch.ones(8), state_dict.StateDictOptions(full_state_dict=True)
model, average = nn.Linear(8, 2), nn.Linear(8, 2)
right = average(image).sum().item()
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
model(image)  # it scores worse than the averaged weights, so use those

for weight, mean in zip(model.parameters(), average.parameters(), strict=True):  # broken
    weight.copy_(mean)  # broken
# fixed: model.reshard()
# fixed: state_dict.set_model_state_dict(model, average.state_dict(), options=options)
assert model(image).sum().item() == right

plain = nn.Linear(8, 2)
plain.load_state_dict(state_dict.get_model_state_dict(model, options=options))
saved = plain(image).sum().item()
assert saved == right, f"the model that was saved gives {saved:.3f} instead of {right:.3f}"
dist.destroy_process_group()
