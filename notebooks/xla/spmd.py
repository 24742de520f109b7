"""FSDPv2: one program for all devices, which the compiler partitions (SPMD). It needs no threads and no workarounds.

PYTHONPATH=../.. PYTHON spmd.py FOLDER
"""

import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import replicas
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
from torch import nn
from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2
from train import COUNTED

from fsdp_helpers.teaching.lessons import xla_inputs


def wrap(model: nn.Module, mesh: spmd.Mesh) -> FSDPv2:
    """Wrap the model with the same policy as train.py. Each parameter is sharded along its longest dimension."""
    return FSDPv2(model, mesh=mesh, auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=10_000))


def train(model: FSDPv2, batches: list, mesh: spmd.Mesh) -> list[float]:
    """Return each step's loss on the global batch, all of which this process sees."""
    optimizer = xla_inputs.start_optimizer(model)
    losses = []
    for images, labels in batches:
        images, labels = images.to("xla"), labels.to("xla")
        spmd.mark_sharding(images, mesh, ("fsdp", None, None, None))  # each device gets its own images
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def main(folder: Path, settings: dict) -> None:
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(settings["replicas"]))
    replicas.keep_graphs(folder)
    xr.use_spmd()
    devices = np.arange(xr.global_runtime_device_count())
    mesh = spmd.Mesh(devices, (len(devices), 1), ("fsdp", "model"))
    model = wrap(replicas.start_model(folder, settings["model"]), mesh)
    losses = train(model, xla_inputs.read_batches(folder), mesh)
    result = {
        "losses": losses,
        "devices": len(devices),
        "processes": xr.process_count(),
        "cut": {
            name: [list(parameter.shape), torch_xla._XLAC._get_xla_sharding_spec(parameter)]
            for name, parameter in model.named_parameters()
        },
        "ops": Counter(COUNTED.findall(replicas.newest_graph(folder))),
    }
    replicas.write_result(folder, result)


if __name__ == "__main__":
    replicas.main(main, sys.argv)
