"""# Everything is printed, logged or written once per rank

**Why.** Each rank runs the full script, so you get N progress bars, N Weights & Biases runs, and N processes
writing to one file. And the number that one rank prints isn't the mean across ranks.

**How to tell.** The same line appears as many times as there are ranks.

**The fix.** Put `if dist.get_rank() == 0:` around printing, logging and writing plain files, but never around a
collective or a forward pass. Reduce numbers across ranks before you print them.

**What you see.**

    AssertionError: step 1 was logged 2 times

**Also seen as**

- logs, progress bars or wandb runs appear once for each GPU
- files are overwritten or corrupted because all ranks write them
"""

from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
log = Path("train.log")  # in the current folder, which all ranks share

with_log = True  # broken: every rank
# fixed: with_log = rank == 0
if with_log:
    with log.open("a") as file:
        file.write("step 1\n")
dist.barrier()
num_lines = len(log.read_text().splitlines())
dist.destroy_process_group()
assert num_lines == 1, f"step 1 was logged {num_lines} times"
