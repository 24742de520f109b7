"""# A full checkpoint doesn't load into a sharded model

**Why.** The model's parameters are DTensors (or flat parameters, with FSDP1), but the file contains full tensors
under their plain names. `load_state_dict` would have to copy full tensors into shards, which it can't do.

**How to tell.** The error comes from `copy_`, or it reports a size mismatch in which one size is a single number, the
length of a flat parameter.

**The fix.** Call `set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True,
broadcast_from_rank0=True))`. With FSDP1, load the file before wrapping, or inside
`FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)`.

**What you see.**

    rank 0 in `model.load_state_dict(weights)  # broken`
    RuntimeError: Error(s) in loading state_dict for FSDPLinear:
    While copying the parameter named "weight", whose dimensions in the model are torch.Size([2, 8])

**Also seen as**

- loading a full, pretrained or single-GPU checkpoint into an FSDP2 model's DTensors fails; broadcast_from_rank0
- resuming from a full checkpoint under FSDP fails with a size mismatch
- `While copying the parameter named`, `aten.copy_.default`
- `Size mismatch between saved` (a run on the CPU)
- `attempted to run this operator with Meta tensors` (torch's MetaFallbackKernel.cpp)
- `is in the state_dict but the state_dict only has` (torch/distributed/fsdp/_state_dict_utils.py)
- `aten.copy_.default: got mixed torch.Tensor and DTensor` (an older PyTorch)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(3)
trained, model = nn.Linear(8, 2), nn.Linear(8, 2)
weights = state_dict.get_model_state_dict(trained)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))

model.load_state_dict(weights)  # broken
# fixed: options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# fixed: state_dict.set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=options)
torch.testing.assert_close(model(torch.ones(8)), trained(torch.ones(8)))
dist.destroy_process_group()
