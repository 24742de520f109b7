"""# unrecognized arguments: --local-rank

**Why.** `python -m torch.distributed.launch` passes `--local-rank=N` to the script, spelled with a hyphen since PyTorch
2.0. torchrun doesn't pass this argument; it sets the variable `LOCAL_RANK` instead.

**How to tell.** The script parses `--local_rank`, and it's started with `python -m torch.distributed.launch`.

**The fix.** Start the script with torchrun and read `int(os.environ['LOCAL_RANK'])`, or accept both spellings:
`parser.add_argument('--local-rank', '--local_rank', type=int)`.

**What you see.**

    error: unrecognized arguments: --local-rank=0

**Also seen as**

- local_rank isn't passed to the script anymore; argparse fails with --local_rank in PyTorch 2.0 and later
- `unrecognized arguments: --local-rank`
- `error: unrecognized arguments: --local_rank=0`, `the following arguments are required: --local_rank`,
  `failed (exitcode: 2) local_rank: 0`, `torch.distributed.launch is deprecated` (a run on the CPU)
- `` please change it to read from `os.environ('LOCAL_RANK')` instead `` (an older PyTorch)
- `Some specified arguments are not used by the HfArgumentParser: ['--local` (transformers)
"""

import argparse
import os
import sys

sys.argv[1:] = [f"--local-rank={os.environ['LOCAL_RANK']}"]  # as torch.distributed.launch does

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)  # broken
# fixed: parser.add_argument("--local-rank", "--local_rank", type=int)
assert parser.parse_args().local_rank == int(os.environ["LOCAL_RANK"])
