"""# A DataLoader worker exits or fails on one rank

**Why.** A worker process died or raised an exception: a file is damaged, a transform fails on one sample, or host
memory ran out. Only that rank fails; the others report a timeout or a lost connection.

**How to tell.** The first traceback says *Caught ... in DataLoader worker process*. To find the line, set
`num_workers=0`.

**The fix.** Catch bad samples inside the dataset and replace them, so that every rank still gets the same number of
samples. *Killed* means that host memory ran out: use fewer workers, a smaller `prefetch_factor`, and arrays instead
of lists of Python objects.

**What you see.**

    rank 1 in `for batch in loader:`
    Caught OSError in DataLoader worker process 0.
    OSError: image file is truncated

**Also seen as**

- one rank dies in its data loader at a random step and the rest hang: a corrupted image or sample kills a worker
- host memory grows with the number of workers and ranks until a worker is killed; collate_fn fails
- `in DataLoader worker process 0`, `in DataLoader worker process`
- `exited unexpectedly`, `is killed by signal: Killed`, `is killed by signal: Aborted`,
  `is killed by signal: Terminated`, `is killed by signal: Segmentation fault`,
  `stack expects each tensor to be equal size`, `each element in list of batch should be of equal size` (a run on the
  CPU)
- `Pin memory thread exited unexpectedly` (torch/utils/data/dataloader.py)
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Images(Dataset):
    def read(self, number):
        if number == 5:
            raise OSError("image file is truncated")
        return torch.ones(2)

    def __getitem__(self, number):
        return self.read(number)  # broken
        # fixed: try:
        # fixed:     return self.read(number)
        # fixed: except OSError:
        # fixed:     return self.read(number - 1)


total = torch.zeros(1)
loader = DataLoader(Images(), sampler=range(8)[rank::world_size], batch_size=2, num_workers=1)
for batch in loader:
    total += batch.sum()
    dist.all_reduce(torch.ones(1))  # a step
dist.all_reduce(total)
assert total == 8 * 2, f"the values of {total / 2} images were read instead of 8"
dist.destroy_process_group()
