"""# Weights only load failed: Unsupported global

**Why.** Since PyTorch 2.6, `torch.load` reads only tensors and plain containers by default, because unpickling can
run code. An older checkpoint may contain more: an argparse namespace, a NumPy scalar, or a whole model.

**How to tell.** The message names the class that isn't allowed.

**The fix.** Save plain dictionaries of tensors. If you trust a file, load it under
`torch.serialization.safe_globals([argparse.Namespace])`, and then save it again. Use `weights_only=False` only for
your own files.

**What you see.**

    _pickle.UnpicklingError: Weights only load failed.
    WeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default.

**Also seen as**

- torch.load fails after an upgrade to PyTorch 2.6; weights_only=True; numpy or argparse objects in the checkpoint
- `Weights only load failed`
- `_pickle.UnpicklingError`, `Unsupported global: GLOBAL`, `WeightsUnpickler error` (a run on the CPU)
"""

import argparse
import io

import torch

file = io.BytesIO()
torch.save({"weight": torch.ones(2), "args": argparse.Namespace(lr=0.1)}, file)

file.seek(0)
saved = torch.load(file)  # broken
# fixed: with torch.serialization.safe_globals([argparse.Namespace]):
# fixed:     saved = torch.load(file)
assert saved["weight"].sum() == 2
