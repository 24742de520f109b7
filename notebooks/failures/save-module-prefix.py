"""# Missing key(s) in state_dict

**Why.** DDP wraps your model in a module, so parameter names begin with `module.`. `torch.compile` and activation
checkpointing add their own prefixes.

**How to tell.** The message lists each name twice: once as missing and once, with a prefix, as unexpected.

**The fix.** Save `model.module.state_dict()`, or `get_model_state_dict(model)`, which removes the prefixes of DDP,
FSDP1 and `torch.compile`, but not all: a compiled block inside a checkpoint wrapper,
`checkpoint_wrapper(torch.compile(block))`, keeps `_orig_mod` in its names. Look at the names once before you rely on
a file.

**What you see.**

    rank 0 in `plain.load_state_dict(saved)`
    RuntimeError: Error(s) in loading state_dict for Linear:
    Missing key(s) in state_dict: "weight", "bias".
    Unexpected key(s) in state_dict: "module.weight", "module.bias".

**Also seen as**

- loading a DDP, FSDP or compiled checkpoint into a plain model fails: all keys have a prefix; strip it
- all keys are missing and all are unexpected, with module., _orig_mod., model., _forward_module. or base_model. in
  front
- `Missing key(s) in state_dict`, `Unexpected key(s) in state_dict`
- `Error(s) in loading state_dict for`, `Missing key(s) in state_dict: "module.`,
  `Unexpected key(s) in state_dict: "_orig_mod.`, `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.` (a run on the
  CPU)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model, plain = nn.Linear(8, 2), nn.Linear(8, 2)
right = model(torch.ones(8))
model = DistributedDataParallel(model)

saved = model.state_dict()  # broken
# fixed: saved = model.module.state_dict()
plain.load_state_dict(saved)
torch.testing.assert_close(plain(torch.ones(8)), right)
dist.destroy_process_group()
