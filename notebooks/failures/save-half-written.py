"""# PytorchStreamReader failed reading zip archive

**Why.** The job was killed, or the disk filled up, while it was overwriting its only checkpoint. The same happens to a
file that every rank writes, all at once, under one name.

**How to tell.** The file is smaller than the previous checkpoint. If the checkpoint is a
`torch.distributed.checkpoint` folder, it has no `.metadata` file. `df` shows a full disk, `quota` a used-up quota.

**The fix.** Write on one rank (or one file per rank), to a temporary file, and rename that when it's complete (on the
same disk, `os.replace` is atomic). Keep the last two checkpoints, and leave room on the disk for a third.

**What you see.**

    rank 0 in `state = torch.load(checkpoint)`
    RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory

**Also seen as**

- the checkpoint can't be read after a crash, a preemption or a full disk, but an older one can
- every rank writes one file with torch.save; or it's a Git LFS pointer or an incomplete download
- `PytorchStreamReader failed reading zip archive`
- `failed finding central directory`, `unexpected pos`, `[enforce fail at inline_container.cc`,
  `invalid header or archive is corrupted`, `unexpected EOF`, `file in archive is not in a subdirectory`,
  `Invalid magic number; corrupt file`, `incomplete metadata, file not fully covered`, `SafetensorError`,
  `No space left on device`, `Disk quota exceeded`, `invalid load key`,
  `Error while deserializing: header too small`, `Error while deserializing: header too large`,
  `Error while deserializing: invalid JSON in header` (a run on the CPU)
- `PytorchStreamWriter failed writing file` (an older PyTorch)
- `Error while deserializing header: HeaderTooLarge`, `Error while deserializing header: MetadataIncompleteBuffer`,
  `Error while deserializing header: InvalidHeaderDeserialization`, `Error while deserializing header: HeaderTooSmall`
  (an older safetensors)
- `Unable to load weights from pytorch checkpoint file` (transformers)
"""

import io
import os

import torch

checkpoint = f"checkpoint-of-rank-{os.environ.get('RANK', '0')}.pt"
torch.save({"step": 1}, checkpoint)

buffer = io.BytesIO()
torch.save({"step": 2}, buffer)
path = checkpoint  # broken
# fixed: path = f"{checkpoint}.part"
with open(path, "wb") as file:
    file.write(buffer.getvalue()[:500])  # killed before the rest, and before os.replace

state = torch.load(checkpoint)
assert state["step"] == 1
