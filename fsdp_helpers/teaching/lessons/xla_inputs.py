"""The starting point shared by both environments: batches and initial parameters read from files, and the optimizer.

The scripts in notebooks/xla also import this module, so it needs only NumPy and whichever torch is installed.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.models.series import build_model

LEARNING_RATE, MOMENTUM = 0.01, 0.9


def read_batches(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return the global batch of every step: images (B, 1, 28, 28) and labels (B,)."""
    with np.load(folder / "batches.npz") as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    return list(zip(images, labels, strict=True))


def start_model(folder: Path, name: str) -> nn.Module:
    """Build the named network with the common initial parameters.

    Transformers use GELU here. With ReLU, rounding can put a tiny input on either side of zero, so two correct
    runs can differ by more than rounding.
    """
    model = build_model(name, dropout=False)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation = F.gelu
    with np.load(folder / f"start-{name}.npz") as file:
        model.load_state_dict({key: torch.from_numpy(file[key]) for key in file.files})
    return model


def start_optimizer(model: nn.Module) -> torch.optim.SGD:
    """Return SGD with momentum for the parameters of `model`: full parameters, or shards once the model is wrapped."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
