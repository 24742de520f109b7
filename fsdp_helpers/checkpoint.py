"""A training state on disk: in one file that rank 0 writes, or in slices, each rank its own.

The state is the model's parameters and what the optimiser keeps of each, under the names that they have in the plain
model. So what one strategy saved, another loads, on any number of ranks. Only tensors are stored, and nothing that
is loaded here can run code.
"""

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fsdp_helpers.checkpoint_folder import CheckpointError

WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# What the index of a sharded checkpoint, `.metadata`, consists of. It is a pickle, and a pickle may name any function
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


# ---------------------------------------------------------------- one file, written by rank 0


def save_full(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gather everything on rank 0 and let it write one file. Every rank has to call this: gathering takes all.

    Rank 0 holds the whole state for that while, 12 bytes a parameter with Adam in fp32, in host memory.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=WHOLE_ON_RANK_0)
    if _rank() == 0:
        torch.save({"model": model_state, "optimizer": optimizer_state}, path)


def load_full(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 reads the file and deals it out: each rank keeps what is its own. Every rank has to call this."""
    saved = torch.load(path, weights_only=True, mmap=True) if _rank() == 0 else {"model": {}, "optimizer": {}}
    options = WHOLE_FROM_RANK_0 if dist.is_initialized() else StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=options
    )


# ---------------------------------------------------------------- slices, written by all ranks


def save_sharded(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Every rank writes the slices it keeps into a file of its own, and rank 0 an index of all slices.

    Where ranks keep whole copies (DDP), they share the writing. `extra` are tensors of this rank alone, under names
    that no other rank uses. Raises CheckpointError where a rank cannot write.
    """
    tensors, _ = _tensors_by_name(model, optimizer)
    try:
        dcp.save({**tensors, "extra": dict(extra or {})}, storage_writer=dcp.FileSystemWriter(folder))
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder}: rank {rank} could not write its part: {cause}") from cause


def save_sharded_async(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> Future:
    """As `save_sharded`, but training waits only until the slices are copied; a thread writes the copy.

    `group` is a gloo group for that thread alone (`dist.new_group(backend="gloo")`): in the group of the training,
    its messages could be taken for those of a step. The checkpoint is whole when `result()` of what is
    returned has come back, and not before.
    """
    tensors, _ = _tensors_by_name(model, optimizer)
    return dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group)


def load_sharded(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Every rank reads the slices that it keeps now, whoever wrote them; `extra` tensors are filled in place."""
    tensors, optimizer_state = _tensors_by_name(model, optimizer)
    dcp.load({**tensors, "extra": dict(extra or {})}, storage_reader=SafeReader(folder))
    with _one_rank_is_no_news():
        set_state_dict(model, optimizer, model_state_dict=tensors["model"], optim_state_dict=optimizer_state)


def _tensors_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, dict], dict[str, Any]]:
    """What a sharded checkpoint holds, and the optimiser's whole state dict, whose tensors are the same.

    The rest of that dict, the settings, is no part of the checkpoint: it comes from the configuration.
    """
    with _one_rank_is_no_news():
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state["state"]}, optimizer_state


@contextmanager
def _one_rank_is_no_news() -> Iterator[None]:
    """With one rank FSDP1 keeps whole copies, and says at each turn that a whole state dict is what it returns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD`` for ``ShardingStrategy``")
        yield


class SafeReader(dcp.FileSystemReader):
    """Reads a sharded checkpoint without running what is in it: an index of known classes, and tensors, nothing else.

    Raises CheckpointError for any other content. (The tensors are read with `weights_only=True` by torch itself.)
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
