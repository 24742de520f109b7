"""The index of a sharded checkpoint: every tensor, and which file holds which slice of it. Read without running it."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from fsdp_helpers.checkpointing.folder import CheckpointError

# What an index, the file `.metadata`, consists of. It is a pickle, and a pickle may name any function
# of any module to be called while it is read; ours names these, which do nothing but hold values.
METADATA_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
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
    begin: int  # where in the file it is, and how many bytes long
    length: int

    @property
    def rank(self) -> int:
        """The rank that wrote it: the file of rank 1 is called `__1_0.distcp`."""
        return int(self.file.split("_")[2])


def read_index(checkpoint: str | os.PathLike) -> list[TensorEntry]:
    """Every tensor of a sharded checkpoint, from its index alone: parameters, optimiser state, random state."""
    metadata = SafeReader(checkpoint).read_metadata()
    places = {(index.fqn, index.offset): stored for index, stored in metadata.storage_data.items()}
    return [
        TensorEntry(
            name=name,
            dtype=stored.properties.dtype,
            shape=tuple(stored.size),
            slices=tuple(
                SliceEntry(
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                    file=(place := places[name, chunk.offsets]).relative_path,
                    begin=place.offset,
                    length=place.length,
                )
                for chunk in stored.chunks
            ),
        )
        for name, stored in metadata.state_dict_metadata.items()
    ]


def read_parameters(checkpoint: str | os.PathLike) -> list[TensorEntry]:
    """Of the tensors of a checkpoint, those that a plain model loads; their names begin with "model."."""
    return [entry for entry in read_index(checkpoint) if entry.name.startswith("model.")]


@contextmanager
def failures_named(folder: str | os.PathLike, what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which no `except Exception` catches, into a CheckpointError of one line."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, CheckpointError):
            raise cause from None
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise CheckpointError(f"{folder}: rank {rank} could not {what}: {reason}") from cause


class SafeReader(dcp.FileSystemReader):
    """Reads a sharded checkpoint without running what is in it: an index of known classes, and tensors, nothing else.

    Raises CheckpointError for any other content. (The tensors are read with `weights_only=True` by torch itself.)
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{path} is not the index of a sharded checkpoint: {error}") from error
        strangers = [
            name for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)
        ]
        if strangers:
            raise CheckpointError(f"{path} lists {strangers[0]!r}, which is no tensor; only tensors are loaded here")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index")
