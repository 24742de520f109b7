"""Write the records of notebook 10: `sudo PYTHONPATH=tests/helpers:. .venv/bin/python tests/evidence/record.py`."""

import json
import os
import sys
import tempfile
from pathlib import Path

import network
import slurm
from leftovers import PROJECT

from fsdp_helpers.gpus import device_name
from fsdp_helpers.training.worker import time_stamp, versions

REFERENCE = PROJECT / "notebooks" / "reference"
SCRIPT = PROJECT / "notebooks" / "cluster" / "train.sbatch"


def main() -> None:
    for name, record in {"bandwidth": record_bandwidth, "slurm": record_slurm}.items():
        if name in (sys.argv[1:] or [name]):
            with tempfile.TemporaryDirectory() as folder:
                content = {"finished": time_stamp(), "versions": versions(), "device_name": device_name(cpu())}
                content |= record(Path(folder))
            (REFERENCE / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def cpu():
    import torch

    return torch.device("cpu")


def record_bandwidth(folder: Path) -> dict:
    with network.two_machines(folder) as machines:
        rates = [network.measure_rate(machines, rate) for rate in (None, *network.SLOW)]
        shardings = [network.measure_sharding(machines, name, network.SLOW_LINK) for name in ("full", "hybrid")]
    return {"model": "shallow", "global_batch_size": 16, "rates": rates, "shardings": shardings}


def record_slurm(folder: Path) -> dict:
    """One job on two nodes: what it was told, what it printed, what its ranks found in their environment."""
    train = ["-m", "fsdp_helpers", "train", "--model", "simple", "--strategy", "fsdp-auto-wrap", "--device", "cpu"]
    train += ["--train-images", 1_200, "--test-images", 101, "--global-batch-size", 24, "--max-steps", 20]
    os.environ |= {"PYTHONPATH": str(PROJECT), "FSDP_OFFLINE": "1"}
    with slurm.running_slurm(folder / "cluster") as cluster:
        queue, output = cluster.watch_job(SCRIPT, *train, "--json", folder / "run.json", folder=folder)
        homes = cluster.submit(SCRIPT, "-m", "fsdp_helpers.teaching.lessons.torchruns", folder / "homes", folder=folder)
        cluster.wait_for(homes, "COMPLETED")
    return {
        "command": " ".join(["sbatch train.sbatch", *map(str, train)]),
        "queue": queue,
        "output": "\n".join(line for line in output.splitlines() if str(folder) not in line),
        "step_losses": json.loads((folder / "run.json").read_text())["step_losses"],
        "homes": [json.loads(path.read_text()) for path in sorted((folder / "homes").glob("*.json"))],
    }


if __name__ == "__main__":
    main()
