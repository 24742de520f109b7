"""XLA on a CPU under torchrun: each process trains by itself, without a warning.

PYTHONPATH=../.. PYTHON -m torch.distributed.run --nproc-per-node 2 two_processes.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import replicas
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend "xla"
import torch_xla.runtime as xr
import train

from fsdp_helpers.teaching.lessons import xla_inputs


def main(folder: Path, settings: dict) -> None:
    """Set up as any torchrun script does, then train as train.py does, on this process's share of the batch."""
    os.environ.update(PJRT_DEVICE="CPU", XLA_ENABLE_PARAM_ALIASING="0")
    dist.init_process_group("xla", init_method="xla://")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (run,) = settings["runs"]
    model = train.wrap(replicas.start_model(folder, run["model"]), run, settings)
    batches = [[part.chunk(world_size)[rank] for part in batch] for batch in xla_inputs.read_batches(folder)]
    result = {
        "losses": train.train(model, batches, xla_inputs.start_optimizer(model), run, replicas.LOCK),
        "world size for torchrun": world_size,
        "world size for XLA": xr.world_size(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    (folder / f"process-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    replicas.main(main, sys.argv)
