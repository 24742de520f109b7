"""A folder in Hugging Face's layout, read with torch's own reader."""

import json
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fsdp_helpers.checkpointing.pretrained_folder import tensors_in_files
from fsdp_helpers.checkpointing.training_state import ignore_single_process_warnings


def read_config(folder: str | Path) -> dict:
    return json.loads(Path(folder, "config.json").read_text())


def load_hugging_face(model: nn.Module, folder: str | Path) -> None:
    """Fill the model; every rank reads only its own rows."""
    with ignore_single_process_warnings():
        dcp.load(tensors_in_files(model), storage_reader=HuggingFaceStorageReader(str(folder)))
