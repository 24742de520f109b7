"""# Training works, but evaluation fails inside nn.TransformerEncoderLayer

**Why.** In evaluation, PyTorch's encoder layer takes a fast path, which reads the inner layers' weights instead of
calling those layers. If the inner layers are FSDP1 units, their weights are flat or empty at that point.

**How to tell.** The error occurs only in `eval()` mode with `no_grad`. The traceback ends in the encoder layer, not in
a linear layer.

**The fix.** Make the whole encoder layer one unit.

**What you see.**

    rank 0 in `torch.testing.assert_close(model(images), right)`
    RuntimeError: setStorage: sizes [8, 8], strides [1, 8], storage offset 0, and itemsize 4

**Also seen as**

- training works, but evaluation fails inside nn.TransformerEncoderLayer
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
torch.manual_seed(0)
model, images = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(1, 8, 8)
units = ModuleWrapPolicy({nn.Linear})  # broken
# fixed: units = ModuleWrapPolicy({nn.TransformerEncoderLayer})
with torch.no_grad():
    right = model(images)
    model = FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"))
    torch.testing.assert_close(model(images), right)
dist.destroy_process_group()
