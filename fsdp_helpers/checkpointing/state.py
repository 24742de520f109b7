"""A training state on disk: in one file that rank 0 writes, or in slices, each rank its own.

The state is the model's parameters and what the optimiser keeps of each, under the names that they have in the plain
model. So what one strategy saved, another loads, on any number of ranks. Only tensors are stored, and nothing that
is loaded here can run code.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from fsdp_helpers.checkpointing.index import SafeReader, failures_named

# ---------------------------------------------------------------- one file, written by rank 0


def save_full(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gather everything on rank 0 and let it write one file. Every rank has to call this: gathering takes all.

    Rank 0 holds the whole state for that while, 12 bytes a parameter with Adam in fp32, in host memory. (torch can
    gather by itself, with `StateDictOptions(full_state_dict=True)`; on the CPU, under FSDP1, torch 2.15 then
    returns the second moment in place of the first, since both were gathered into the same buffer.)
    """
    tensors, optimizer_state = _tensors_by_name(model, optimizer)
    whole = tree_map(_gathered, {"model": tensors["model"], "optimizer": optimizer_state})
    if _rank() == 0:
        torch.save(whole, path)


def _gathered(value: Any) -> Any:
    """A slice becomes the whole tensor, on rank 0 and in host memory; on the other ranks it is let go at once."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.cpu() if _rank() == 0 else None
    return value


def load_full(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 reads the file and deals it out, tensor by tensor. Every rank has to call this."""
    tensors, optimizer_state = _tensors_by_name(model, optimizer)
    saved = torch.load(path, weights_only=True, mmap=True) if _rank() == 0 else None
    for name, tensor in tensors["model"].items():
        _deal_out(saved and saved["model"][name], tensor)
    for name, values in tensors["optimizer"].items():
        for kind, tensor in values.items():
            _deal_out(saved and saved["optimizer"]["state"][name][kind], tensor)
    _put_back(model, optimizer, tensors["model"], optimizer_state)


def _deal_out(whole: Tensor | None, own: Tensor) -> None:
    """Fill `own`, a rank's slice or copy, from the `whole` tensor that rank 0 has."""
    if isinstance(own, DTensor):
        if whole is None:
            whole = torch.empty(own.shape, dtype=own.dtype)  # its shape counts; the values come from rank 0
        dealt = distribute_tensor(whole.to(own.device_mesh.device_type), own.device_mesh, own.placements)
        own.to_local().copy_(dealt.to_local())
    else:
        if whole is not None:
            own.copy_(whole)
        if dist.is_initialized():
            dist.broadcast(own, src=0)


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
    with failures_named(folder, "write its part"):
        dcp.save({**tensors, "extra": dict(extra or {})}, storage_writer=dcp.FileSystemWriter(folder))


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
    with failures_named(folder, "read its part"):
        dcp.load({**tensors, "extra": dict(extra or {})}, storage_reader=SafeReader(folder))
    _put_back(model, optimizer, tensors["model"], optimizer_state)


def _tensors_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, dict], dict[str, Any]]:
    """What a sharded checkpoint holds, and the optimiser's whole state dict, whose tensors are the same.

    The rest of that dict, the settings, is no part of the checkpoint: it comes from the configuration.
    """
    with _one_rank_is_no_news():
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state["state"]}, optimizer_state


def _put_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, model_state: dict[str, Tensor], optimizer_state: dict[str, Any]
) -> None:
    with _one_rank_is_no_news():
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


@contextmanager
def _one_rank_is_no_news() -> Iterator[None]:
    """With one rank FSDP1 keeps whole copies, and says at each turn that a whole state dict is what it returns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD`` for ``ShardingStrategy``")
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
