"""A script made for GPUs: names of devices and backends are redirected to the CPU where they're used.

What asks the CUDA runtime itself, such as `torch.cuda.Stream`, isn't redirected: the script fails on that line.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_helpers.inspecting.watch import Watch

NAMES = ("device_ids", "output_device", "device_id", "device")  # of arguments that may be a GPU's number
FACTORIES = "arange as_tensor empty eye full linspace ones rand randint randn randperm tensor zeros".split()
TAKE_DEVICES = [
    *((torch, name) for name in FACTORIES),
    *((torch, "load"), (torch.autocast, "__init__"), (Tensor, "to"), (nn.Module, "to"), (nn.Module, "to_empty")),
    *((dist, "init_process_group"), (dist, "new_group"), (dist, "init_device_mesh")),
    *((nn.parallel.DistributedDataParallel, "__init__"), (FullyShardedDataParallel, "__init__")),
]


def on_cpu(value: Any, is_device: bool = False) -> Any:
    """Return what takes the place of a device or backend; any other value as it is."""
    if isinstance(value, str) and "nccl" in value:
        return "gloo"
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda" or is_device and type(value) is int:
        return torch.device("cpu")
    return value


def redirect(watch: Watch) -> None:
    """From now on, do on the CPU what the script asks of a GPU."""
    init_process_group = dist.init_process_group

    def call(original: Any, *args: Any, **options: Any) -> Any:
        is_to = original.__name__ == "to"
        options = {name: on_cpu(value, name in NAMES) for name, value in options.items()}
        if options.get("device_ids"):
            options |= {"device_ids": None, "output_device": None}
        if original is init_process_group:
            options.pop("device_id", None)
        return original(*(on_cpu(value, is_to and i == 1) for i, value in enumerate(args)), **options)

    for owner, name in TAKE_DEVICES:
        watch.around(owner, name, call)
    for owner in (Tensor, nn.Module):
        watch.around(owner, "cuda", lambda original, owner, *args, **options: owner)
    watch.around(torch.cuda, "set_device", lambda original, device: None)
    watch.around(torch.cuda, "current_device", lambda original: 0)
