"""# Loading succeeds, but the model is untrained

**Why.** With `strict=False`, names that don't match are skipped. `torch.compile` puts `_orig_mod.` in front of every
name, and DDP adds `module.`, so all names are skipped without an error.

**How to tell.** Print what `load_state_dict` returns: every key in the model is missing, and every key in the file is
unexpected. The first loss is as high as an untrained model's.

**The fix.** Keep `strict=True` (the default). Remove the prefix with `name.removeprefix('_orig_mod.')`, or save plain
names ([how](save-module-prefix.py)).

**What you see.**

    AssertionError: after loading, the model's output is 0.0 instead of -1.015

**Also seen as**

- load_state_dict(strict=False) succeeds without loading anything: names begin with module. or _orig_mod., no key
  matched
- switched to FSDP2: the loss isn't decreasing from ln(vocabulary), 10 to 12, and grad_norm = 0 for all training
  steps; the loaded model produces garbage or random accuracy
- `_IncompatibleKeys(missing_keys=` (a run on the CPU)
- `Did not find param with FQN` (torch/distributed/fsdp/_state_dict_utils.py)
- `were not initialized from the model checkpoint`, `Some weights of the model checkpoint` (transformers)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(3)
trained, model, image = nn.Linear(8, 1), nn.Linear(8, 1), torch.ones(8)
weights = {f"_orig_mod.{name}": weight for name, weight in trained.state_dict().items()}  # as torch.compile names them
for parameter in model.parameters():
    nn.init.zeros_(parameter)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

options = StateDictOptions(full_state_dict=True, strict=False)  # broken
# fixed: options = StateDictOptions(full_state_dict=True)
# fixed: weights = {name.removeprefix("_orig_mod."): weight for name, weight in weights.items()}
set_model_state_dict(model, weights, options=options)
output, right = round(model(image).item(), 3), round(trained(image).item(), 3)
assert output == right, f"after loading, the model's output is {output} instead of {right}"
dist.destroy_process_group()
