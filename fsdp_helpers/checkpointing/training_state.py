"""Training state in memory: tensors by name, and everything else an optimizer keeps. Rank 0 can save it in one file.

Tensors are named as in the plain model, so a state can be loaded under any strategy, on any number of ranks.
"""

import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from fsdp_helpers.checkpointing.folder import atomic_file
from fsdp_helpers.ranks.group import gather_over_ranks
from fsdp_helpers.sharding.wrapping import plain_name

# These settings depend on the device, so they aren't part of a training state.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")

# ---------------------------------------------------------------- by name


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of a model and its optimizer. Except under FSDP1, these are the live tensors, not copies."""

    model: dict[str, Tensor]  # parameters and buffers
    optimizer: dict[str, dict[str, Any]]  # each parameter's moments and similar tensors
    groups: list[dict[str, Any]]  # each parameter group's settings, and its names under "params"
    buffers: frozenset[str]  # the names in `model` that are buffers
    torch_names: dict[str, str]  # each name in `model` -> the name that torch gives the tensor here

    @property
    def values(self) -> dict[str, Any]:
        """Return everything in `model` and `optimizer` as one flat dict with names such as "model.fc1.weight"."""
        return _leaves({"model": self.model, "optimizer": self.optimizer})


def read_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, to_fill: bool = False
) -> TrainingState:
    """Return the state of `model` and `optimizer`; every rank has to call this. (Under FSDP1, the tensors are copies.)

    A new optimizer has no state yet, so none is returned, and it stays new. But a state that's `to_fill` is there: torch
    takes a step with a learning rate of 0 for it, which Adam counts. `set_state` has to replace it, or the caller to
    clear it, since training would go on one step late.
    """
    is_empty = optimizer is not None and not optimizer.state
    is_new = optimizer is not None and all(gather_over_ranks(is_empty))
    with ignore_single_process_warnings():
        if optimizer is None:
            model_state, optimizer_state = get_model_state_dict(model), {"state": {}, "param_groups": []}
        else:
            model_state, optimizer_state = get_state_dict(model, optimizer)
    if is_empty and not to_fill:
        optimizer.state.clear()
    moments = {} if is_new and not to_fill else optimizer_state["state"]
    groups = optimizer_state["param_groups"]
    buffers = {name_in_plain_model(model, name) for name, _ in model.named_buffers()}
    torch_names = {plain_name(name): name for name in model_state}
    return TrainingState(
        model={plain_name(name): tensor for name, tensor in model_state.items()},
        optimizer={plain_name(name): kept for name, kept in moments.items()},
        groups=[group | {"params": [*map(plain_name, group["params"])]} for group in groups],
        buffers=frozenset(buffers & torch_names.keys()),
        torch_names=torch_names,
    )


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: TrainingState) -> None:
    """Set `model` and `optimizer` to `state`. A parameter without moments in `state` loses its current moments."""
    here = state.torch_names
    model_state = {here[name]: tensor for name, tensor in state.model.items()}
    with ignore_single_process_warnings():
        if optimizer is None or not state.optimizer:
            set_model_state_dict(model, model_state)
        else:
            groups = [group | {"params": [here[name] for name in group["params"]]} for group in state.groups]
            moments = {here[name]: kept for name, kept in state.optimizer.items()}
            set_state_dict(
                model,
                optimizer,
                model_state_dict=model_state,
                optim_state_dict={"state": moments, "param_groups": groups},
                options=StateDictOptions(strict=False),  # parameters that have never had a gradient have no moments
            )
    if optimizer is not None and not state.optimizer:
        optimizer.state.clear()


def name_in_plain_model(model: nn.Module, name: str) -> str:
    """Return the name that a parameter or buffer of the wrapped `model` has in the plain model."""
    name = plain_name(name)
    under_compile = getattr(model, "_orig_mod", model)
    return name.removeprefix("module.") if isinstance(under_compile, DistributedDataParallel) else name


def _leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict, in which each leaf's key is its path."""
    if not isinstance(tree, Mapping):
        return {name: tree}
    branches = {f"{name}.{key}".removeprefix("."): branch for key, branch in tree.items()}
    return {
        path: leaf for branch_name, branch in branches.items() for path, leaf in _leaves(branch, branch_name).items()
    }


@contextmanager
def ignore_single_process_warnings() -> Iterator[None]:
    """Silence two warnings in single-rank runs: that FSDP1 holds full copies, and that torch saves in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD`` for ``ShardingStrategy``")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# ---------------------------------------------------------------- one file, written by rank 0


def save_full(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Collect the full state on rank 0, which writes one file. Every rank has to call this, since it's a collective.

    Meanwhile, rank 0 holds the full state in host memory: 12 bytes per parameter with Adam in fp32. (torch can also do
    this with `StateDictOptions(full_state_dict=True, cpu_offload=True)`. But on the CPU, under FSDP1, torch 2.15 then
    returns the second moment in place of the first, since both go through the same buffer.)
    """
    state = read_state(model, optimizer)
    optimizer_state = {"state": state.optimizer, "param_groups": state.groups}
    whole = tree_map(gather_on_rank_0, {"model": state.model, "optimizer": optimizer_state})
    if this_rank() == 0:
        with atomic_file(path) as file:
            torch.save(whole, file)


def gather_on_rank_0(value: Any) -> Any:
    """Return the full tensor for the shard `value`, in host memory, on rank 0; other ranks free it and return None."""
    if isinstance(value, ShardedTensor):  # of FSDP1 without a mesh
        device = value.metadata().shards_metadata[0].placement.device()
        full = torch.empty(value.size(), dtype=value.dtype, device=device) if this_rank() == 0 else None
        value.gather(0, full)
        value = full
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.cpu() if this_rank() == 0 else None
    return value


# ---------------------------------------------------------------- each rank's random state


RANDOM_STATE = "extra.random-state-{}"  # to be formatted with the rank


def random_state(rank: int) -> dict[str, Tensor]:
    """Return the states of this rank's CPU and CUDA generators, under names that are unique to the rank."""
    state = {RANDOM_STATE.format(rank): torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state[RANDOM_STATE.format(f"cuda-{rank}")] = torch.cuda.get_rng_state()
    return state


def restore_random_state(saved: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Set this rank's random generators to their states in `saved`.

    If a state is missing, because the number of ranks was different or there was no GPU, the generator starts a stream
    that no rank has drawn from yet. The seed comes from rank 0's state, so resuming twice draws the same numbers twice.
    """
    first = saved.get(RANDOM_STATE.format(0))
    if first is not None:
        stream = [zlib.crc32(first.numpy()), world_size, rank]
        torch.manual_seed(int(np.random.default_rng(stream).integers(2**63)))
    for name in random_state(rank).keys() & saved.keys():
        if "cuda" in name:
            torch.cuda.set_rng_state(saved[name])
        else:
            torch.set_rng_state(saved[name])
