"""Writes the records that notebook 10 shows: `sudo PYTHONPATH=tests:. .venv/bin/python tests/cluster/record.py`."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import network
import slurm
from leftovers import PROJECT

from fsdp_helpers.ranks.group import device_name
from fsdp_helpers.training.worker import time_stamp, versions

REFERENCE = PROJECT / "notebooks" / "reference"
SCRIPT = PROJECT / "notebooks" / "cluster" / "train.sbatch"
VARIABLES = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}


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
    with slurm.running_slurm(folder) as cluster:
        settings = {"folder": folder, "FSDP_OFFLINE": "1", **VARIABLES}
        job = cluster.submit(SCRIPT, *train, "--json", folder / "run.json", **settings)
        queue = watch_queue(cluster, job)
        homes = cluster.submit(SCRIPT, "-m", "fsdp_helpers.teaching.homes", folder / "homes", **settings)
        cluster.wait_for(homes, "COMPLETED")
        output = (folder / f"train-{job}.out").read_text()
    return {
        "command": " ".join(["sbatch train.sbatch", *map(str, train)]),
        "queue": queue,
        "output": [line for line in output.splitlines() if line.startswith("[default0]:") and str(folder) not in line],
        "step_losses": json.loads((folder / "run.json").read_text())["step_losses"],
        "homes": [json.loads(path.read_text()) for path in sorted((folder / "homes").glob("*.json"))],
    }


def watch_queue(cluster: slurm.Slurm, job: str) -> str:
    """What squeue shows while the job runs."""
    cluster.wait_for(job, "RUNNING")
    time.sleep(2)
    shown = cluster.run("squeue", "--format=%.6i %.8j %.10T %.6D %N")
    cluster.wait_for(job, "COMPLETED")
    return shown


if __name__ == "__main__":
    main()
