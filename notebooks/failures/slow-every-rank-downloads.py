"""# Startup takes a long time, and the data is sometimes corrupted

**Why.** Every rank prepares the same folder at the same time. There are N downloads, and one rank may read files
that another is still writing.

**How to tell.** The download appears in the log once per rank.

**The fix.** Write `if rank == 0: download()`, then `dist.barrier()` on all ranks. On several machines, download on
one rank per machine.

**What you see.**

    AssertionError: the data were downloaded 2 times

**Also seen as**

- a download shows up in the log once per rank
- the map or tokenization runs once for each GPU
- `BadZipFile`, `File is not a zip file`, `Dataset not found or corrupted`, `FileExistsError: [Errno 17] File
  exists` (a run on the CPU)
- `429 Client Error: Too Many Requests` (huggingface_hub)
"""

from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
downloads = Path("downloads")  # in the current folder, which all ranks share

# fixed: if rank == 0:
if True:  # broken: every rank
    downloads.mkdir(exist_ok=True)
    (downloads / f"by-rank-{rank}").write_text("the data")
dist.barrier()
count = len(list(downloads.iterdir()))
assert count == 1, f"the data were downloaded {count} times"
dist.destroy_process_group()
