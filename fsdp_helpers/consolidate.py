"""One file from a sharded checkpoint, for a plain model, without a process group and without a second copy in memory."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp_helpers.checkpoint import SafeReader
from fsdp_helpers.checkpoint_folder import find_newest, read_checkpoint

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


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint, as its index describes it, and which file holds which slice of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple["SliceEntry", ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class SliceEntry:
    """Where a slice begins in its tensor, how large it is, and the file that one rank wrote it to."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


def read_index(checkpoint: str | os.PathLike) -> list[TensorEntry]:
    """Every tensor of a sharded checkpoint, from its index alone: parameters, optimiser state, random state."""
    metadata = SafeReader(checkpoint).read_metadata()
    files = {(index.fqn, index.offset): stored.relative_path for index, stored in metadata.storage_data.items()}
    return [
        TensorEntry(
            name=name,
            dtype=stored.properties.dtype,
            shape=tuple(stored.size),
            slices=tuple(
                SliceEntry(offsets=tuple(c.offsets), sizes=tuple(c.sizes), file=files[name, c.offsets])
                for c in stored.chunks
            ),
        )
        for name, stored in metadata.state_dict_metadata.items()
    ]


def consolidate(checkpoint: str | os.PathLike, out: str | os.PathLike) -> list[TensorEntry]:
    """Write the model's parameters from a sharded checkpoint to the file `out`: .safetensors, or .pt for `torch.load`.

    `checkpoint` is the folder of one checkpoint, or of a run's checkpoints: then the newest. A .safetensors file is
    mapped into memory and each slice copied to its place; a .pt file is put together in memory. Beyond
    that, one slice at a time is in memory. Returns what was written.

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
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, out)  # all of it or nothing
        except BaseException:
            os.unlink(file.name)
            raise
    return entries


def _write_safetensors(checkpoint: Path, entries: list[TensorEntry], file: IO[bytes]) -> None:
    """A length, a description in JSON, and all tensors one after the other: the whole format."""
    description, end = {}, 0
    for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):  # wide types first keeps all aligned
        start, end = end, end + entry.num_bytes
        description[_plain_name(entry)] = {
            "dtype": SAFETENSORS_TYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    header = json.dumps(description).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    file.flush()
    begin = file.tell()
    os.posix_fallocate(file.fileno(), 0, begin + end)  # a full disk is an error here, and a crash in a mapped file
    mapped = torch.from_file(file.name, shared=True, size=begin + end, dtype=torch.uint8)
    tensors = {}
    for entry in entries:
        start, end = description[_plain_name(entry)]["data_offsets"]
        tensors[_plain_name(entry)] = mapped[begin + start : begin + end].view(entry.dtype).view(entry.shape)
    _read(checkpoint, tensors)


def _write_pt(checkpoint: Path, entries: list[TensorEntry], file: IO[bytes]) -> None:
    tensors = {_plain_name(entry): torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
    _read(checkpoint, tensors)
    torch.save(tensors, file)
    file.flush()


WRITERS: dict[str, Callable] = {".safetensors": _write_safetensors, ".pt": _write_pt}


def _read(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be here
        dcp.load({"model": tensors}, storage_reader=SafeReader(checkpoint), no_dist=True)


def _plain_name(entry: TensorEntry) -> str:
    return entry.name.removeprefix("model.")
