"""`save` and `load`: the whole state of any training loop, as one folder that is there whole or not at all.

Every rank writes the shards it keeps into a file of its own, and rank 0 an index of all shards; where ranks keep whole
copies (DDP), they share the writing. Everything else is JSON, in `state.json` beside them. So nothing that is
loaded can run code.
"""

import json
import os
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

from fsdp_helpers.checkpointing.folder import (
    CheckpointError,
    begin,
    checkpoint_name,
    commit,
    find_newest,
    read_checkpoint,
    step_of,
    whole_file,
)
from fsdp_helpers.checkpointing.index import SafeReader, TensorEntry, failures_named, read_index
from fsdp_helpers.checkpointing.plain import put_together, take_apart, tensor_names
from fsdp_helpers.checkpointing.randomness import NAME, random_state, restore_random_state
from fsdp_helpers.checkpointing.state import (
    IMPLEMENTATION,
    TrainingState,
    ignore_single_process_warnings,
    num_ranks,
    put_back,
    read_state,
    this_rank,
)
from fsdp_helpers.ranks.group import gather_over_ranks

STATE = "state.json"

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
    """Save a training state as `folder`, new or empty. Every rank has to call this, and writes what it keeps.

    Args:
        model: plain, or under DDP, FSDP1 or FSDP2. Its parameters are saved, and its buffers as rank 0 has them.
        optimizer: its state, and its settings of this moment, such as the learning rate.
        extra: what else the loop needs to go on, as rank 0 has it: counters, `schedule.state_dict()`. Numbers, text,
            lists, dicts and whole tensors. (Each rank's random state is saved without asking.)
        settings: JSON for `checkpoint.json`, where people look; `load` does not read it.
        wait: False returns a Future as soon as the state is copied, and a thread writes the copy. The checkpoint is
            whole when `result()` has come back, on any rank, and not before.
        group: for that thread alone, where there are several ranks: `dist.new_group(backend="gloo")`. In the group
            of the training, its messages could be taken for those of a step.

    Raises CheckpointError, on every rank, if one of them cannot write; then there is no `folder`. Raises
    ValueError for an `extra` that is not plain.
    """
    path = Path(folder).absolute()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise CheckpointError(f"{path} is there already; choose a different name, such as {checkpoint_name(20)}")
    if not wait and group is None and num_ranks() > 1:
        raise ValueError('saving in the background needs a group of its own: group=dist.new_group(backend="gloo")')
    tensors, plain = _content(model, optimizer, extra)
    unfinished = begin(path)
    if this_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # what a killed process left there
    gather_over_ranks("it is gone")  # before a rank makes the folder anew
    writer = dcp.FileSystemWriter(unfinished)
    description = {"step": step_of(path), "world_size": num_ranks(), "settings": settings or {}}
    with ignore_single_process_warnings():
        if wait:
            _finish(lambda: dcp.save(tensors, storage_writer=writer), unfinished, plain, description)
            return None
        written = dcp.async_save(tensors, storage_writer=writer, process_group=group)
    thread = ThreadPoolExecutor(max_workers=1)
    future = thread.submit(_finish, written.result, unfinished, plain, description, group)
    thread.shutdown(wait=False)  # after this one task
    return future


def _content(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collect what this rank writes: tensors by name, everything else as JSON.

    Under FSDP1, torch gathers the state to cut it by rows, so a save temporarily allocates more than the whole state.
    """
    is_new = optimizer is not None and all(gather_over_ranks(not optimizer.state))
    state = read_state(model, optimizer)
    if is_new:
        optimizer.state.clear()  # a checkpoint before the first step changes no step
    values = {name: value for name, value in state.values.items() if not (is_new and name.startswith("optimizer."))}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    extra_tensors = random_state(this_rank())
    plain = {
        "optimizer": None if optimizer is None else take_apart(_settings(state), "settings", extra_tensors),
        "values": {name: take_apart(value, name, {}) for name, value in values.items() if name not in tensors},
        "extra": take_apart(extra, "extra", extra_tensors),
    }
    if this_rank() > 0:  # buffers and extra tensors that differ between ranks are rank 0's, all of them
        tensors = {name: tensor for name, tensor in tensors.items() if name.removeprefix("model.") not in state.buffers}
        extra_tensors = random_state(this_rank())
    return tensors | extra_tensors, plain


def _settings(state: TrainingState) -> list[dict[str, Any]]:
    return [{key: kept for key, kept in group.items() if key not in IMPLEMENTATION} for group in state.groups]


def _finish(
    write: Callable[[], object],
    unfinished: Path,
    plain: dict[str, Any],
    description: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Wait until every rank has written; rank 0 renames the folder, and every rank learns whether that worked."""
    failure = None
    try:
        with failures_named(unfinished, "write its part"):
            write()
        if this_rank() == 0:
            with whole_file(unfinished / STATE, "w") as file:
                json.dump(plain, file)
            commit(unfinished, **description)
    except (OSError, CheckpointError) as error:
        failure = str(error)
    failures = [None] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(failures, failure, group=group)
    if failure := next(filter(None, [failure, *failures]), None):
        if this_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # room for others, where the disk is full
        raise CheckpointError(f"nothing was saved: {failure}")


# ---------------------------------------------------------------- loading


def load(folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load what `save` saved, under any strategy and on any number of ranks; return its `extra`.

    Every rank has to call this, with the model and the optimizer as they are before the first step, and reads what
    it keeps. `folder` is a checkpoint, or holds several that are called step-00000020 and so on: then the newest.
    The optimizer gets its settings too, the learning rate among them, but computes as it is set up now (`fused`,
    `foreach`). As many ranks as saved get their random state back; other ranks get streams that none has drawn from
    yet. Tensors in `extra` come back in host memory.

    Raises CheckpointError if there is no complete checkpoint, or if it holds a different model.
    """
    path = find_newest(Path(folder)) or Path(folder)
    checkpoint = read_checkpoint(path)
    stored = {entry.name: entry for entry in read_index(path)}
    plain = _read_plain(path, stored)
    state = read_state(model, optimizer)
    check_model(path, stored.values(), {name: tuple(tensor.size()) for name, tensor in state.model.items()})
    if optimizer is not None:
        _check_optimizer(path, plain, stored, state)

    own = {name: value for name, value in state.values.items() if name in stored and isinstance(value, Tensor)}
    as_many = checkpoint.world_size == num_ranks()
    random = _empty(stored, [NAME.format(0), *(random_state(this_rank()) if as_many else ())])
    extra = _empty(stored, tensor_names([plain["extra"], plain["optimizer"]]))
    with failures_named(path, "read its part"), ignore_single_process_warnings():
        dcp.load({**own, **random, **extra}, storage_reader=SafeReader(path))

    found = own | {name: put_together(value, {}) for name, value in plain["values"].items()}
    put_back(model, optimizer, replace(state, optimizer=_found_again(state.optimizer, found, "optimizer")))
    if optimizer is not None and plain["optimizer"] is not None:
        for group, saved in zip(optimizer.param_groups, put_together(plain["optimizer"], extra), strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
    restore_random_state(random, this_rank(), num_ranks())
    return put_together(plain["extra"], extra)


def check_model(
    path: Path, stored: Iterable[TensorEntry], shapes: Mapping[str, tuple[int, ...]], what: str = "model"
) -> None:
    """Raise CheckpointError unless the model in `path` has exactly the parameters and buffers that `shapes` names."""
    found = {entry.name: entry.shape for entry in stored if entry.name.startswith("model.")}
    expected = {f"model.{name}": shape for name, shape in shapes.items()}
    for name in sorted(expected.keys() | found.keys()):
        there, here = (names.get(name, "no place") for names in (found, expected))
        if there != here:
            raise CheckpointError(f"{path} holds a different {what}: {name} has shape {there} there and {here} here")


def _check_optimizer(path: Path, plain: dict[str, Any], stored: Iterable[str], state: TrainingState) -> None:
    saved = plain["optimizer"]
    if saved is None:
        if not any(name.startswith("optimizer.") for name in stored):
            raise CheckpointError(f"{path} was saved without an optimizer; load it without one")
        return  # of a version that left the settings to the configuration
    there, here = ([set(group["params"]) for group in groups] for groups in (saved, state.groups))
    if there != here:
        raise CheckpointError(
            f"{path} was saved with {len(there)} parameter group(s) of {[*map(len, there)]} parameters, the optimizer "
            f"here has {len(here)} of {[*map(len, here)]}, or others; build it as the one that was saved"
        )
    kinds = {kind for kept in state.optimizer.values() for kind in kept}
    for name in [*stored, *plain["values"]]:
        if name.startswith("optimizer.") and name not in state.values:
            raise CheckpointError(
                f"{path} holds {name}, which the optimizer here does not keep; "
                f"of each parameter it keeps {', '.join(sorted(kinds)) or 'nothing'}"
            )


def _read_plain(path: Path, stored: Iterable[str]) -> dict[str, Any]:
    """Return the content of `state.json`; nothing for a checkpoint of an earlier version, which wrote none."""
    nothing = {"optimizer": None, "values": {}, "extra": None}
    if not (path / STATE).exists():
        return nothing
    try:
        content = json.loads((path / STATE).read_text())
        if content.keys() != nothing.keys():
            raise ValueError(f"it holds {', '.join(content)}")
        put_together(content, dict.fromkeys(stored))  # raises where it contradicts itself or the index
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / STATE} is damaged: {error!r}") from error
    return content


def _empty(stored: Mapping[str, TensorEntry], names: Iterable[str]) -> dict[str, Tensor]:
    """Allocate, in host memory, those tensors of `names` that are stored."""
    entries = [stored[name] for name in names if name in stored]
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}


def _found_again(tree: Mapping[str, Any], found: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return `tree`, nested dicts, with each leaf replaced by what was found under its path; drop the others."""
    kept = {}
    for key, branch in tree.items():
        name = f"{path}.{key}"
        if isinstance(branch, Mapping):
            if below := _found_again(branch, found, name):
                kept[key] = below
        elif name in found:
            kept[key] = found[name]
    return kept
