"""# Grad strides do not match bucket view strides

**Why.** DDP copies each gradient into its place in a bucket, which has the parameter's layout. If a gradient
arrives in a different layout (after `transpose` or `permute`, in 1 x 1 convolutions, or with `channels_last` images
and a model in a different layout), that copy is slower, in every step.

**How to tell.** It's only a warning; the results are right. The message shows the parameter's sizes and strides.

**The fix.** Give the model and the images the same layout: `model.to(memory_format=torch.channels_last)`. Call
`.contiguous()` after the `transpose` or `permute` that feeds the layer. Or ignore the warning.

**What you see.**

    AssertionError: Grad strides do not match bucket view strides

**Also seen as**

- a warning about strides under DDP; this is not an error, but may impair performance
- `Grad strides do not match bucket view strides`, `This is not an error, but may impair performance` (a run on the
  CPU)
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_warn_always(True)  # otherwise C++ gives each warning once
images = torch.randn(2, 1, 8, 8).to(memory_format=torch.channels_last)

layout = torch.contiguous_format  # broken: the images' layout is channels_last
# fixed: layout = torch.channels_last
model = DistributedDataParallel(nn.Conv2d(1, 4, 3).to(memory_format=layout))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model(images).square().mean().backward()
torch.set_warn_always(False)
said = [str(warning.message).partition(".")[0] for warning in caught if "Grad strides" in str(warning.message)]
assert not said, said[0]
dist.destroy_process_group()
