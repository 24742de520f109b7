"""One file from a sharded checkpoint, for a plain model: no process group, and one tensor at a time in memory."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import IO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp_helpers.checkpoint_folder import find_newest, read_checkpoint
from fsdp_helpers.checkpoint_index import SafeReader, TensorEntry, read_index

# How safetensors calls the types that parameters have.
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def consolidate(checkpoint: str | os.PathLike, out: str | os.PathLike) -> list[TensorEntry]:
    """Write the model's parameters from a sharded checkpoint to the file `out`: .safetensors, or .pt for `torch.load`.

    `checkpoint` is the folder of one checkpoint, or of a run's checkpoints: then the newest. A .safetensors file is
    written tensor by tensor, with one of them in memory; a .pt file is put together in memory. Beyond that, memory
    holds one slice at a time. Returns what was written.

    Raises CheckpointError for what is not a whole checkpoint, ValueError for an `out` that cannot be written.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if out.suffix not in WRITERS:
        raise ValueError(f"{out}: choose a name that ends in one of {', '.join(WRITERS)}")
    checkpoint = find_newest(checkpoint) or checkpoint
    read_checkpoint(checkpoint)
    entries = [entry for entry in read_index(checkpoint) if entry.name.startswith("model.")]
    with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}-", delete=False) as file:
        try:
            WRITERS[out.suffix](checkpoint, entries, file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, out)  # all of it or nothing
        except BaseException:
            os.unlink(file.name)
            raise
    return entries


def _write_safetensors(checkpoint: Path, entries: list[TensorEntry], file: IO[bytes]) -> None:
    """A length, a description in JSON, and all tensors one after the other: the whole format."""
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # wide types first keeps all aligned
    ends = list(accumulate(entry.num_bytes for entry in entries))
    description = {
        _plain_name(entry): {
            "dtype": SAFETENSORS_TYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (end - entry.num_bytes, end),
        }
        for entry, end in zip(entries, ends, strict=True)
    }
    header = json.dumps(description).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        _read(checkpoint, {_plain_name(entry): tensor})
        file.write(tensor.view(-1).view(torch.uint8).numpy().data)


def _write_pt(checkpoint: Path, entries: list[TensorEntry], file: IO[bytes]) -> None:
    tensors = {_plain_name(entry): torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
    _read(checkpoint, tensors)
    torch.save(tensors, file)


WRITERS: dict[str, Callable] = {".safetensors": _write_safetensors, ".pt": _write_pt}


def _read(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be here
        dcp.load({"model": tensors}, storage_reader=SafeReader(checkpoint), no_dist=True)


def _plain_name(entry: TensorEntry) -> str:
    return entry.name.removeprefix("model.")
