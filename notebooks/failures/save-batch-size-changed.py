"""# After resuming with a different batch size, some images are seen twice

**Why.** The checkpoint stores the number of steps. Once the batch size has changed, that number no longer tells you
how many images have been seen.

**How to tell.** Check whether the number of steps times the batch size equals the number of images seen.

**The fix.** Save the number of images seen, not the number of steps, and skip that many. Or refuse to resume with a
different batch size.

**What you see.**

    AssertionError: images [6, 7, 8, 9, 10, 11] were seen twice

**Also seen as**

- resuming with a different number of GPUs or batch size: the wrong number of samples is skipped; data seen twice, or
  not at all
- the loss jumps down after a resume: the data starts over, and the model sees what it has seen before
"""

import torch
from torch.utils.data import DataLoader

images = torch.arange(24)
seen, batch_size, num_steps, num_seen = [], 4, 0, 0
for batch in DataLoader(images, batch_size):
    seen += batch.tolist()
    num_steps += 1
    num_seen += len(batch)
    if num_steps == 3:
        break  # the job ends here, with its checkpoint

batch_size = 2  # the next job has less memory
start = num_steps * batch_size  # broken
# fixed: start = num_seen
for batch in DataLoader(images[start:], batch_size):
    seen += batch.tolist()
twice = sorted(image for image in set(seen) if seen.count(image) > 1)
assert len(set(seen)) == 24 and not twice, f"images {twice} were seen twice"
