"""The index of a sharded checkpoint: every tensor, and the file of each of its shards. Reading it runs no code."""

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_helpers.checkpointing.folder import CheckpointError
from fsdp_helpers.sharding.wrapping import plain_name

# An index is the file `.metadata`, which is a pickle, and reading a pickle can call any function in any module. A real
# index names only these classes, which do nothing but hold values. Attributes may be set only on instances of RECORDS.
RECORDS = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    StorageMeta,
    _StorageInfo,
)
METADATA_CLASSES = {(kind.__module__, kind.__name__) for kind in RECORDS} | {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # their names in Python 3.13
    ("pathlib._local", "WindowsPath"),
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor in a checkpoint, as the index describes it, with the file of each of its shards."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple["ShardEntry", ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard of a tensor: its offsets, its size, and its file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int  # the position of its first byte in the file; `length` is its number of bytes
    length: int

    @property
    def rank(self) -> int:
        """Return the rank that wrote this shard; rank 1's file is called `__1_0.distcp`."""
        return int(self.file.split("_")[2])


def read_index(checkpoint: str | os.PathLike) -> list[TensorEntry]:
    """Return an entry for every tensor in a sharded checkpoint: parameters, optimizer state and random states.

    This reads only the index. Raises CheckpointError if the index is damaged, names files in another folder, or lists
    anything but tensors.
    """
    return _tensor_entries(checkpoint, SafeReader(checkpoint).read_metadata())


def read_index_of_anyone(checkpoint: str | os.PathLike) -> tuple[list[TensorEntry], list[str]]:
    """Return the tensors in any folder that torch.distributed.checkpoint wrote, and the names of everything else in it.

    Anything that isn't a tensor is stored as a pickle, so it isn't read.
    """
    metadata = read_metadata(Path(checkpoint, ".metadata"))
    return _tensor_entries(checkpoint, metadata), _no_tensors(metadata)


def check_model(path: Path, stored: Iterable[TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the model in `path` has exactly the parameters and buffers listed in `shapes`."""
    found = {entry.name: entry.shape for entry in stored if entry.name.startswith("model.")}
    expected = {f"model.{name}": shape for name, shape in shapes.items()}
    for name in sorted(expected.keys() | found.keys()):
        there, here = (names.get(name, "none") for names in (found, expected))
        if there != here:
            raise CheckpointError(
                f"{path} belongs to a different model: {name} has shape {there} in the checkpoint, but {here} here"
            )


def _tensor_entries(checkpoint: str | os.PathLike, metadata: Metadata) -> list[TensorEntry]:
    places = {(index.fqn, index.offset): stored for index, stored in metadata.storage_data.items()}
    tensors = {
        name: kind for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)
    }
    try:
        return [
            TensorEntry(
                name=name,
                dtype=stored.properties.dtype,
                shape=tuple(stored.size),
                shards=tuple(_shard_entry(chunk, places[name, chunk.offsets]) for chunk in stored.chunks),
            )
            for name, stored in tensors.items()
        ]
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{Path(checkpoint, '.metadata')} contradicts itself: {error!r}") from error


def _shard_entry(chunk: ChunkStorageMetadata, place: _StorageInfo) -> ShardEntry:
    return ShardEntry(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        file=place.relative_path,
        begin=place.offset,
        length=place.length,
    )


def _no_tensors(metadata: Metadata) -> list[str]:
    stored = metadata.state_dict_metadata.items()
    return [name for name, kind in stored if not isinstance(kind, TensorStorageMetadata)]


@contextmanager
def as_checkpoint_error(folder: str | os.PathLike, action: str) -> Iterator[None]:
    """Within the block, turn a CheckpointException (which `except Exception` doesn't catch) into a CheckpointError."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, CheckpointError):
            raise cause from None
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise CheckpointError(f"{folder}: rank {rank} couldn't {action}: {reason}") from cause


class SafeReader(dcp.FileSystemReader):
    """A reader of sharded checkpoints that never runs code: the index may contain only known record types and tensors.

    Raises CheckpointError for anything else. (torch reads the tensors with `weights_only=True`.)
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        metadata = read_metadata(path)
        if strangers := _no_tensors(metadata):
            raise CheckpointError(f"{path} lists {strangers[0]!r}, which isn't a tensor; only tensors can be loaded")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(path: Path) -> Metadata:
    """Return the contents of the index at `path`, with plain names, which earlier versions didn't always write.

    Raises CheckpointError if it contains anything but known record types, or names a file in another folder.
    """
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it contains a {type(metadata).__name__}")
        files: set[str] = {place.relative_path for place in metadata.storage_data.values()}
        kinds, places = metadata.state_dict_metadata.items(), metadata.storage_data.items()
        metadata.state_dict_metadata = {plain_name(name): kind for name, kind in kinds}
        metadata.storage_data = {replace(index, fqn=plain_name(index.fqn)): place for index, place in places}
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path} isn't the index of a sharded checkpoint: {error}") from error
    for name in files:
        # An absolute path, or one with "..", would lead out of the folder.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{path} names the file {str(name)!r}; a checkpoint's files must be in the same folder as its index"
            )
    return metadata


PythonUnpickler: Any = pickle._Unpickler  # the pure-Python version, whose methods type checkers don't know about


def _member(enumeration: Any, name: str) -> Any:
    """Stand in for `getattr`, which pickles from Python before 3.11.4 call; allow only the one enum in an index."""
    if enumeration is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it names builtins.getattr, which doesn't belong in an index")
    return enumeration[name]


class _MetadataUnpickler(PythonUnpickler):  # pure Python, so its methods can be overridden
    """An unpickler that finds only known classes, and modifies only records that it has created."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which doesn't belong in an index")

    def load_build(self) -> None:
        """Allow the BUILD opcode, which sets attributes, only on records: on a class, the change would persist."""
        state, record = self.stack[-1], self.stack[-2]
        if type(record) not in RECORDS or not isinstance(
            state, dict if type(record) is not TensorProperties else tuple
        ):
            raise pickle.UnpicklingError(f"it sets attributes of {record!r}, which isn't a record of an index")
        try:
            super().load_build()
        except ValueError as error:  # a newer torch may have added a field to a record
            name, here = type(record).__name__, torch.__version__
            raise pickle.UnpicklingError(f"its {name} doesn't match torch {here}; a newer version wrote it") from error

    dispatch = PythonUnpickler.dispatch | {pickle.BUILD[0]: load_build}
