"""# The checkpoint is a folder of __0_0.distcp files

**Why.** A sharded checkpoint (DCP, SHARDED_STATE_DICT) has one file per rank and a `.metadata` file. `torch.load` and
`from_pretrained` expect a single file or safetensors files.

**How to tell.** The folder contains `__0_0.distcp`, or the folder is named `pytorch_model_fsdp_0` or `global_step`.
If the folder has no `.metadata` file, the save never finished.

**The fix.** Convert the folder with `dcp_to_torch_save(folder, file)`, as here, with `python -m
torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt`, or with
`accelerate merge-weights FOLDER OUT`. To continue training, use `dcp.load`.

**What you see.**

    rank 0 in `weights = torch.load("checkpoint")  # broken`
    IsADirectoryError: [Errno 21] Is a directory: 'checkpoint'

**Also seen as**

- how to merge or convert a sharded checkpoint, distcp files, pytorch_model_fsdp_0, into one safetensors file or
  Hugging Face model
- the saved FSDP model has no pytorch_model.bin or model.safetensors; zero_to_fp32
- `IsADirectoryError`
- `.metadata'` (a run on the CPU)
- `Error no file named pytorch_model.bin`, `Can't find a valid checkpoint at`, `no file named model.safetensors`
  (transformers)
- `pytorch_model_fsdp`, `save_only_model option is not compatible with FSDP state dict type` (transformers,
  accelerate)
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(3)
model, plain, image = nn.Linear(8, 2), nn.Linear(8, 2), torch.ones(8)
right = model(image)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
dcp.save(get_model_state_dict(model), checkpoint_id="checkpoint")

if dist.get_rank() == 0:
    weights = torch.load("checkpoint")  # broken
    # fixed: dcp.format_utils.dcp_to_torch_save("checkpoint", "model.pt")
    # fixed: weights = torch.load("model.pt")
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain(image), right)
dist.destroy_process_group()
