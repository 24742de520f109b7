"""The strategies, one function each, all with the same signature: `apply_*(model, device, config) -> model`.

Each takes a freshly initialised model on the CPU, the same on every rank, and returns it ready to train.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torch

from fsdp_helpers.config import TrainConfig


def apply_local(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """One process, one whole model."""
    return model.to(device)


def apply_ddp(model: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Every rank a whole model; gradients are averaged in buckets while backward still runs."""
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=device_ids)


STRATEGIES = {
    "local": apply_local,
    "ddp": apply_ddp,
}


def count_units(model: nn.Module) -> int:
    """The number of FSDP units in `model`, the root included; 0 where nothing is sharded."""
    return 0
