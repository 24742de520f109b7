"""# environment variable RANK expected, but not set

**Why.** `init_process_group` reads the rank, the world size and the address from environment variables that torchrun
sets. If you start the script with `python train.py`, those variables aren't set. A script that falls back to rank 0
of 1 then trains alone, without an error.

**How to tell.** `env | grep -E 'RANK|WORLD_SIZE|MASTER'` prints nothing. A collective that is called without
`init_process_group` fails with *Default process group has not been initialized*.

**The fix.** Start the script with `torchrun --standalone --nproc-per-node 8 train.py`. Under Slurm, start one
torchrun per node, as in [notebook 10](../10_many_machines.ipynb).

**What you see.** The script's own error, from `python train.py`:

    Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set
    AssertionError: the ranks print the world sizes [] instead of ['2', '2']

**Also seen as**

- the processes don't know about each other: every one prints rank 0, world size 1, and trains alone
- a single process or a single GPU: FSDP, DDP, SyncBatchNorm or all_reduce is called without a process group
- `environment variable RANK expected, but not set`
- `Default process group has not been initialized`, `Error initializing torch.distributed using env:// rendezvous`,
  `environment variable WORLD_SIZE expected, but not set`, `environment variable MASTER_ADDR expected, but not set`,
  `environment variable MASTER_PORT expected, but not set`, `KeyError: 'LOCAL_RANK'`, `KeyError: 'RANK'`,
  `KeyError: 'WORLD_SIZE'`, `KeyError: 'MASTER_ADDR'`, `KeyError: 'SLURM_PROCID'`, `KeyError: 'LOCAL_WORLD_SIZE'`,
  `please make sure to call init_process_group`, `` FSDP is switching to use `NO_SHARD` instead of
  ShardingStrategy.FULL_SHARD since the world size is 1 ``, `offload_to_cpu=True and NO_SHARD is not supported yet`,
  `Invalid process group specified`, `error: the following arguments are required: training_script` (a run on the CPU)
- `LOCAL_RANK is not in the environment` (torch/distributed/distributed_c10d.py)
- `DeviceMesh process groups not initialized` (torch/distributed/device_mesh.py)
- `can only be used when parameters are flatten and sharded` (torch/distributed/fsdp/_state_dict_utils.py)
- `Using fsdp only works in distributed training`, `Using FSDP is only possible in distributed training`
  (transformers, accelerate)
- `Default process group is not initialized` (an older PyTorch)
- `local_rank == -1` (transformers)
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = """
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"{dist.get_world_size()}\\n", end="")  # in one piece: two ranks print
dist.destroy_process_group()
"""

from_torchrun = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
shell = {name: value for name, value in os.environ.items() if name not in from_torchrun}

torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

if os.environ.get("RANK", "0") == "0":  # one job is enough
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN)
        command = [sys.executable, "train.py"]  # broken
        # fixed: command = [sys.executable, *torchrun, "train.py"]
        job = subprocess.run(command, cwd=folder, env=shell | {"TMPDIR": folder}, stdout=subprocess.PIPE, text=True)
    sizes = job.stdout.split()
    assert sizes == ["2", "2"], f"the ranks print the world sizes {sizes} instead of ['2', '2']"
