"""`save` and `load` the full state of any training loop, atomically, as one folder.

Every rank writes its shards to its own file, and rank 0 writes an index of all shards; if every rank has a full copy
(DDP), the ranks split the work of writing it. Everything else is in `state.pt`, which is read with
`torch.load(weights_only=True)`, so loading never runs code.
"""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fsdp_helpers.checkpointing.folder import (
    CheckpointError,
    atomic_file,
    begin,
    checkpoint_name,
    commit,
    find_newest,
    read_checkpoint,
    step_of,
)
from fsdp_helpers.checkpointing.older_versions import STATE as OLDER_STATE
from fsdp_helpers.checkpointing.older_versions import read_state_json
from fsdp_helpers.checkpointing.shard_index import SafeReader, TensorEntry, as_checkpoint_error, check_model, read_index
from fsdp_helpers.checkpointing.training_state import (
    IMPLEMENTATION,
    RANDOM_STATE,
    TrainingState,
    ignore_single_process_warnings,
    name_in_plain_model,
    num_ranks,
    random_state,
    read_state,
    restore_random_state,
    set_state,
    this_rank,
)
from fsdp_helpers.quantities import format_count
from fsdp_helpers.ranks.group import gather_over_ranks
from fsdp_helpers.sharding.wrapping import plain_name, tied_names

STATE = "state.pt"

# ---------------------------------------------------------------- saving


def save(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    settings: dict | None = None,
    wait: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Future | None:
    """Save a training state in `folder`, which must be new or empty. Every rank calls this and writes its own shards.

    Args:
        model: a plain model, or one under DDP, FSDP1 or FSDP2; its parameters and rank 0's buffers are saved.
        optimizer: its state is saved, along with its current settings, such as the learning rate.
        extra: anything else the loop needs to continue, such as counters or `schedule.state_dict()`; rank 0's copy is
            saved. `extra` may contain numbers, text, lists, dicts and full tensors. (Random states are always saved.)
        settings: a dict that's written to `checkpoint.json` for people to read; `load` ignores it.
        wait: if False, return a Future as soon as the state has been copied; a thread then writes the copy. The
            checkpoint isn't complete until `result()` has returned on at least one rank.
        group: a process group for that thread alone, required if there are several ranks:
            `dist.new_group(backend="gloo")`. In the group used for training, the thread's collectives could get mixed
            up with the step's collectives.

    Raises CheckpointError on every rank if any rank can't write; in that case, `folder` isn't created. Raises
    ValueError if `extra` isn't plain data, or if `settings` can't be written as JSON.
    """
    path = Path(folder).absolute()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise CheckpointError(f"{path} already exists; choose another name, such as {checkpoint_name(20)}")
    if not wait and group is None and num_ranks() > 1:
        raise ValueError('saving in the background needs its own process group: group=dist.new_group(backend="gloo")')
    description = {"step": step_of(path), "world_size": num_ranks(), "settings": _as_json(settings or {})}
    tensors, plain = _content(model, optimizer, extra)
    unfinished = begin(path)
    if this_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # left there by a killed process
    gather_over_ranks(None)  # no rank creates the folder again until the old one is gone
    writer = dcp.FileSystemWriter(unfinished)
    with ignore_single_process_warnings():
        if wait:
            _finish(lambda: dcp.save(tensors, storage_writer=writer), unfinished, plain, description)
            return None
        written = dcp.async_save(tensors, storage_writer=writer, process_group=group)
    thread = ThreadPoolExecutor(max_workers=1)
    future = thread.submit(_finish, written.result, unfinished, plain, description, group)
    thread.shutdown(wait=False)  # the thread ends after this one task
    return future


def _content(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> tuple[dict[str, Tensor], bytes]:
    """Return the data that this rank writes: tensors by name, and everything else as the contents of `state.pt`.

    Under FSDP1, torch unshards the state and then shards it again by rows, so saving temporarily allocates more than
    the full state.
    """
    state = read_state(model, optimizer)
    values = state.values
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    plain = {
        "optimizer": None if optimizer is None else _settings(state),
        "values": {name: value for name, value in values.items() if name not in tensors},
        "extra": extra,
    }
    if this_rank() > 0:  # buffers may differ between ranks, and only rank 0's are saved
        tensors = {name: tensor for name, tensor in tensors.items() if name.removeprefix("model.") not in state.buffers}
    return tensors | random_state(this_rank()), _packed(plain)


def _packed(plain: dict[str, Any]) -> bytes:
    """Return `plain` as the bytes of a `state.pt`. Raises ValueError for objects that `load` would refuse."""
    written = io.BytesIO()
    try:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(plain)):
            raise TypeError("it contains a DTensor")
        torch.save(plain, written)
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "a checkpoint can hold numbers, text, lists, dicts and full tensors, but no other objects "
            f"({_first_line(error)}). In `extra`, pass an object's state_dict(), a number, or a tensor"
        ) from error
    return written.getvalue()


def _as_json(settings: dict) -> dict[str, Any]:
    """Return `settings` as they'll be read from JSON. Every rank checks them, or all others would wait for rank 0."""
    copied = {}
    for key, value in settings.items():
        try:
            copied |= json.loads(json.dumps({key: value}))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"settings[{key!r}] is {value!r}, which can't be written as JSON ({error}); pass str(...) of it, or "
                "leave it out"
            ) from error
    return copied


def _first_line(error: Exception) -> str:
    told = [line.strip() for line in str(error).splitlines() if "nsupported" in line or "Can't" in line]
    return (told or str(error).splitlines() or [type(error).__name__])[0]


def _settings(state: TrainingState) -> list[dict[str, Any]]:
    return [{key: kept for key, kept in group.items() if key not in IMPLEMENTATION} for group in state.groups]


def _finish(
    write: Callable[[], object],
    unfinished: Path,
    plain: bytes,
    description: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's data; rank 0 then renames the folder. Raises CheckpointError on all ranks if any rank fails."""
    failure = None
    try:
        with as_checkpoint_error(unfinished, "write its shards"):
            write()
        if this_rank() == 0:
            with atomic_file(unfinished / STATE) as file:
                file.write(plain)
            commit(unfinished, **description)
    except (OSError, CheckpointError) as error:
        failure = str(error)
    failures = [None] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(failures, failure, group=group)
    if failure := next(filter(None, [failure, *failures]), None):
        if this_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # makes room in case the disk is full
        raise CheckpointError(f"nothing was saved: {failure}")


# ---------------------------------------------------------------- loading


def load(folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load a training state written by `save`, under any strategy and on any number of ranks; return its `extra`.

    Every rank has to call this, with a model and optimizer that haven't taken a step yet, and reads only its own
    shards. `folder` is a checkpoint, or a folder of checkpoints named step-00000020 and so on, from which the newest is
    loaded. The optimizer's settings, including the learning rate, are restored, except for its implementation (`fused`,
    `foreach`). On the number of ranks that saved it, each rank gets its random states back. On any other number, only
    rank 0's CPU generator does; all other generators start streams that no rank has drawn from yet. Tensors in `extra`
    come back in host memory.

    Parameters that are one tensor in `model` must be equal in the checkpoint. (This isn't checked under FSDP1 without
    `use_orig_params`.) The reverse is fine: the tied parameters of a checkpoint become equal copies.

    Raises CheckpointError if there's no complete checkpoint, or if it belongs to a different model; the optimizer then
    has no more state than before.
    """
    is_empty = optimizer is not None and not optimizer.state
    try:
        return _load(newest_checkpoint(folder) or Path(folder), model, optimizer)
    except BaseException:
        if is_empty:
            optimizer.state.clear()
        raise


def newest_checkpoint(folder: str | os.PathLike) -> Path | None:
    """Return the newest checkpoint in `folder`, or None if there isn't one yet.

    Every rank has to call this. The answer is rank 0's, since other machines may see a shared folder a minute late.
    """
    return gather_over_ranks(find_newest(Path(folder)))[0]


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    checkpoint = read_checkpoint(path)
    stored = {entry.name: entry for entry in read_index(path)}
    plain = _read_plain(path, dict.fromkeys(stored))
    state = read_state(model, optimizer, to_fill=True)
    check_model(path, stored.values(), {name: tuple(tensor.size()) for name, tensor in state.model.items()})
    _check_ties(path, model, state)
    if optimizer is not None:
        _check_optimizer(path, plain, stored, state)

    own = {name: value for name, value in state.values.items() if name in stored and isinstance(value, Tensor)}
    as_many = checkpoint.world_size == num_ranks()
    random = _empty(stored, [RANDOM_STATE.format(0), *(random_state(this_rank()) if as_many else ())])
    older = _empty(stored, [name for name in stored if name.startswith(("extra.", "settings.")) and name not in random])
    with as_checkpoint_error(path, "read its shards"), ignore_single_process_warnings():
        dcp.load({**own, **random, **older}, storage_reader=SafeReader(path))

    plain = _read_plain(path, older)  # with its tensors, if an older version stored them along with the model's
    found = own | plain["values"]
    set_state(model, optimizer, replace(state, optimizer=_found_again(state.optimizer, found, "optimizer")))
    if optimizer is not None and plain["optimizer"] is not None:
        for group, saved in zip(optimizer.param_groups, plain["optimizer"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
    restore_random_state(random, this_rank(), num_ranks())
    return plain["extra"]


def _check_ties(path: Path, model: nn.Module, state: TrainingState) -> None:
    """Raise CheckpointError on all ranks if parameters differ in `path` that are one tensor in `model`."""
    for names in tied_names(model):
        first, *others = (name_in_plain_model(model, name) for name in names)
        copies = {f"model.{name}": state.model[name].detach().clone() for name in (first, *others)}
        with as_checkpoint_error(path, "read its shards"), ignore_single_process_warnings():
            dcp.load(copies, storage_reader=SafeReader(path))
        for name in others:
            one, other = (_own_shards(copies[f"model.{name}"]) for name in (first, name))
            if not all(gather_over_ranks(all(map(torch.equal, one, other)))):
                raise CheckpointError(
                    f"{path} belongs to a different model: {first} and {name} differ there, but are one tensor here"
                )


def _own_shards(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, ShardedTensor):  # of FSDP1 without a mesh
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _check_optimizer(path: Path, plain: dict[str, Any], stored: Iterable[str], state: TrainingState) -> None:
    saved = plain["optimizer"]
    if saved is None:
        if not any(name.startswith("optimizer.") for name in stored):
            raise CheckpointError(f"{path} was saved without an optimizer; load it without one")
        return  # saved by a version that didn't save the optimizer's settings
    there, here = ([set(group["params"]) for group in groups] for groups in (saved, state.groups))
    if there != here:
        raise CheckpointError(
            f"{path} was saved with {format_count(len(there), 'parameter group')} of {[*map(len, there)]} parameters; this "
            f"optimizer has {len(here)} of {[*map(len, here)]}, or different parameters; build it as in that run"
        )
    kinds = {kind for kept in state.optimizer.values() for kind in kept}
    for name in [*stored, *plain["values"]]:
        if name.startswith("optimizer.") and name not in state.values:
            raise CheckpointError(
                f"{path} has {name}, but this optimizer doesn't; for each parameter, it keeps "
                f"{', '.join(sorted(kinds)) or 'nothing'}"
            )


def _read_plain(path: Path, older: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return the contents of `state.pt`. Checkpoints from earlier versions have `state.json` instead, or neither file.

    `older` contains the tensors that an earlier version stored along with the model's tensors.
    """
    if (path / OLDER_STATE).exists():
        return read_state_json(path, older)
    nothing = {"optimizer": None, "values": {}, "extra": None}
    if not (path / STATE).exists():
        return nothing
    try:
        content = torch.load(path / STATE, map_location="cpu", weights_only=True)
        if content.keys() != nothing.keys():
            raise ValueError(f"it has the keys {', '.join(content)}")
        content["values"] = {plain_name(name): value for name, value in content["values"].items()}
        for group in content["optimizer"] or ():
            group["params"] = [plain_name(name) for name in group["params"]]
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path / STATE} is damaged: {_first_line(error)}") from error
    return content


def _empty(stored: Mapping[str, TensorEntry], names: Iterable[str]) -> dict[str, Tensor]:
    """Return an uninitialized tensor in host memory for each of the `names` that occur in `stored`."""
    entries = [stored[name] for name in names if name in stored]
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}


def _found_again(tree: Mapping[str, Any], found: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the nested dicts in `tree` with leaf values looked up by path in `found`; omit leaves not found there."""
    kept = {}
    for key, branch in tree.items():
        name = f"{path}.{key}"
        if isinstance(branch, Mapping):
            if below := _found_again(branch, found, name):
                kept[key] = below
        elif name in found:
            kept[key] = found[name]
    return kept
