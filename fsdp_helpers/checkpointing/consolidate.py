"""Turn a sharded checkpoint into one file for a plain model, one tensor at a time and without a process group."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fsdp_helpers.checkpointing.folder import DESCRIPTION, CheckpointError, atomic_file, find_newest, read_checkpoint
from fsdp_helpers.checkpointing.shard_index import ShardEntry, TensorEntry, read_index_of_anyone

# safetensors' names for the dtypes it supports.
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 2**20  # read at a time; this much memory is needed in addition to the tensor


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """The tensors that were written, and the names of the entries that were skipped because they aren't tensors."""

    tensors: tuple[TensorEntry, ...]
    skipped: tuple[str, ...]


def consolidate(checkpoint: str | os.PathLike, out: str | os.PathLike, *, prefix: str = "model.") -> Consolidated:
    """Write a model's tensors from a sharded checkpoint to the file `out`: .safetensors, or .pt for `torch.load`.

    `checkpoint` is any folder that `torch.distributed.checkpoint` wrote, or a folder of checkpoints named step-00000020
    and so on, from which the newest is used. The file gets the tensors whose names start with `prefix`, which is
    stripped. A .safetensors file is written with one tensor in memory at a time; a .pt file is built in memory.

    Raises CheckpointError if the checkpoint is incomplete or has no such tensors; ValueError if `out` can't be written.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if out.suffix not in WRITERS:
        raise ValueError(f"{out}: choose a name that ends in {' or '.join(WRITERS)}")
    checkpoint = find_newest(checkpoint) or checkpoint
    if (checkpoint / DESCRIPTION).exists() or not (checkpoint / ".metadata").exists():
        read_checkpoint(checkpoint)  # our own checkpoints record the sizes of their files
    entries, skipped = read_index_of_anyone(checkpoint)
    tensors = {entry.name.removeprefix(prefix): entry for entry in entries if entry.name.startswith(prefix)}
    if not tensors:
        raise CheckpointError(
            f"{checkpoint} has no tensor whose name starts with {prefix!r}; it has, for example, "
            f"{', '.join(entry.name for entry in entries[:2])}; give another prefix"
        )
    try:
        with atomic_file(out) as file:
            WRITERS[out.suffix](checkpoint, tensors, file)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        raise ValueError(f"{out} couldn't be written: {error}") from error
    return Consolidated(tensors=tuple(tensors.values()), skipped=tuple(skipped))


def _write_safetensors(checkpoint: Path, tensors: dict[str, TensorEntry], file: IO[bytes]) -> None:
    """Write the header's length, the header in JSON, and the tensors one after another: that's the entire format."""
    for entry in tensors.values():
        if entry.dtype not in SAFETENSORS_TYPES:
            raise CheckpointError(
                f"{entry.name} has dtype {entry.dtype}, which safetensors doesn't support; write a .pt file"
            )
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # wide dtypes first: keeps all aligned
    ends = accumulate(entry.num_bytes for _, entry in ordered)
    description = {
        name: {
            "dtype": SAFETENSORS_TYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (end - entry.num_bytes, end),
        }
        for (name, entry), end in zip(ordered, ends, strict=True)
    }
    header = json.dumps(description).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    buffer = torch.empty(max(entry.num_bytes for entry in tensors.values()), dtype=torch.uint8)  # for one at a time
    for _, entry in ordered:
        values = buffer[: entry.num_bytes]
        _read(checkpoint, entry, values.view(entry.dtype).view(entry.shape))
        file.write(values.numpy().data)


def _write_pt(checkpoint: Path, tensors: dict[str, TensorEntry], file: IO[bytes]) -> None:
    whole = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in tensors.items()}
    for name, entry in tensors.items():
        _read(checkpoint, entry, whole[name])
    torch.save(whole, file)


WRITERS: dict[str, Callable] = {".safetensors": _write_safetensors, ".pt": _write_pt}


def _read(checkpoint: Path, entry: TensorEntry, tensor: Tensor) -> None:
    """Fill `tensor` by reading its shards straight into place, and check each for damage.

    Each shard is stored the way `torch.save` stores a tensor: in a zip archive whose member data/0 has the values, in
    the order they had in memory. (`dcp.load` could do this, and it would be faster, but torch doesn't check the
    archive's checksum, so a corrupted byte would end up in a weight.)
    """
    for part in entry.shards:
        place = tensor
        for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            place = place.narrow(dim, offset, size)
        if not place.numel():
            continue
        try:
            stored = _read_layout(checkpoint / part.file, part)
            fits = place.is_contiguous() and stored.is_contiguous()  # in rows, both here and in the file
            values = place.view(-1) if fits else torch.empty(place.numel(), dtype=place.dtype)
            _read_values(checkpoint / part.file, part, memoryview(values.view(torch.uint8).numpy()))
            if not fits:
                place.copy_(values.as_strided(place.size(), stored.stride()))
        except Exception as error:  # a damaged archive may raise anything
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(f"{checkpoint / part.file} is damaged at {entry.name}: {reason}") from error


def _read_layout(path: Path, part: ShardEntry) -> Tensor:
    """Return the shard as a meta tensor, which has its shape and strides without its values; this runs no code."""
    try:
        with open(path, "rb") as file:
            return torch.load(_Window(file, part.begin, part.length), map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:  # whose message suggests to read the file without weights_only
        raise ValueError("it isn't stored as a plain tensor") from error


def _read_values(path: Path, part: ShardEntry, buffer: memoryview) -> None:
    """Fill `buffer` from the shard's archive; zipfile verifies the checksum of everything that it reads."""
    with open(path, "rb") as file, zipfile.ZipFile(_Window(file, part.begin, part.length)) as archive:
        (member,) = [found for found in archive.infolist() if found.filename.endswith("/data/0")]
        if member.file_size != len(buffer):
            raise ValueError(f"{member.file_size:,} bytes instead of {len(buffer):,}")
        for found in archive.infolist():
            if found is not member:
                archive.read(found)  # the layout comes from there
        with archive.open(member) as values:
            for begin in range(0, len(buffer), CHUNK_BYTES):
                chunk = values.read(CHUNK_BYTES)
                buffer[begin : begin + len(chunk)] = chunk


class _Window(io.RawIOBase):
    """A file object that reads part of another file."""

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
            raise ValueError("can't seek to before the beginning of the file")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._position)
        found = self._file.read(max(0, min(len(buffer), self._length - self._position)))
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
