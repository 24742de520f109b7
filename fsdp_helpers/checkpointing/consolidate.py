"""One file from a sharded checkpoint, for a plain model: no process group, and one tensor at a time in memory."""

import io
import json
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fsdp_helpers.checkpointing.folder import CheckpointError, find_newest, read_checkpoint
from fsdp_helpers.checkpointing.index import SliceEntry, TensorEntry, read_parameters

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
    written tensor by tensor, with one of them in memory; a .pt file is put together in memory. Returns what was
    written.

    Raises CheckpointError for what is not a whole checkpoint, ValueError for an `out` that cannot be written.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if out.suffix not in WRITERS:
        raise ValueError(f"{out}: choose a name that ends in one of {', '.join(WRITERS)}")
    checkpoint = find_newest(checkpoint) or checkpoint
    read_checkpoint(checkpoint)
    entries = read_parameters(checkpoint)
    with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}-", delete=False) as file:
        try:
            WRITERS[out.suffix](checkpoint, entries, file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, out)  # all of it or nothing
        except (OSError, RuntimeError) as error:  # RuntimeError: torch.save, of a stream that takes no more
            os.unlink(file.name)
            raise ValueError(f"{out} could not be written: {error}") from error
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
    buffer = torch.empty(max(entry.num_bytes for entry in entries), dtype=torch.uint8)  # one for all, in turn
    for entry in entries:
        values = buffer[: entry.num_bytes]
        _read(checkpoint, entry, values.view(entry.dtype).view(entry.shape))
        file.write(values.numpy().data)


def _write_pt(checkpoint: Path, entries: list[TensorEntry], file: IO[bytes]) -> None:
    tensors = {_plain_name(entry): torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
    for entry in entries:
        _read(checkpoint, entry, tensors[_plain_name(entry)])
    torch.save(tensors, file)


WRITERS: dict[str, Callable] = {".safetensors": _write_safetensors, ".pt": _write_pt}


def _read(checkpoint: Path, entry: TensorEntry, tensor: Tensor) -> None:
    """Fill `tensor`. Its slices are read straight into their places, and a damaged one is found out.

    Each slice is stored as `torch.save` stores a tensor: in a zip archive, whose member data/0 is the values. Nothing
    else in it is looked at, so nothing in it is run.
    """
    for part in entry.slices:
        place = tensor
        for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        if not place.numel():
            continue
        values = place.contiguous()  # `place` itself where the slice is made of whole rows
        try:
            _read_values(checkpoint / part.file, part, values.view(-1).view(torch.uint8).numpy())
        except (OSError, ValueError, struct.error, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{checkpoint / part.file} is damaged, at {entry.name}: {error}") from error
        if values is not place:
            place.copy_(values)


def _read_values(path: Path, part: SliceEntry, buffer: np.ndarray) -> None:
    with open(path, "rb") as file:
        with zipfile.ZipFile(_Window(file, part.begin, part.length)) as archive:
            (member,) = [found for found in archive.infolist() if found.filename.endswith("/data/0")]
        header_begin = part.begin + member.header_offset
        file.seek(header_begin + 26)  # a member's header: 30 bytes, the last 4 of them the lengths of what follows
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        file.seek(header_begin + 30 + name_length + extra_length)
        if member.file_size != len(buffer) or file.readinto(buffer) != len(buffer):
            raise ValueError(f"{member.file_size:,} bytes instead of {len(buffer):,}")
        if zlib.crc32(buffer) != member.CRC:
            raise ValueError("the checksum is wrong")


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: bytearray) -> int:
        self._file.seek(self._begin + self._position)
        found = self._file.read(max(0, min(len(buffer), self._length - self._position)))
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def _plain_name(entry: TensorEntry) -> str:
    return entry.name.removeprefix("model.")
