"""Failures in loading weights and optimizer state into a sharded model, or in saving them."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, images, in_units, small_model

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# ---------------------------------------------------------------- every rank reads the full model


def pretrained_file(folder: str) -> Path:
    path = Path(folder, "model.pt")
    torch.save(small_model(seed=3).state_dict(), path)
    return path


def bytes_of_all_ranks(weights: dict[str, Tensor]) -> Numbers:
    held = torch.tensor(float(sum(tensor.nbytes for tensor in weights.values())))
    dist.all_reduce(held)
    return {"bytes read into host memory": held.item()}


def read_on_every_rank(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    with tempfile.TemporaryDirectory() as folder:
        weights = torch.load(pretrained_file(folder), weights_only=True)
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    return bytes_of_all_ranks(weights) | {"sum of outputs": model(images()).sum().item()}


def read_on_rank_0(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    with tempfile.TemporaryDirectory() as folder:
        weights = torch.load(pretrained_file(folder), weights_only=True) if rank == 0 else {}
        set_model_state_dict(model, dict(weights), options=FROM_RANK_0)
    return bytes_of_all_ranks(weights) | {"sum of outputs": model(images()).sum().item()}


def one_copy() -> Numbers:
    weights = small_model(seed=3).state_dict()
    held = float(sum(tensor.nbytes for tensor in weights.values()))
    return {"bytes read into host memory": held, "sum of outputs": small_model(seed=3)(images()).sum().item()}


# ---------------------------------------------------------------- names that don't match


def compiled_weights() -> dict[str, Tensor]:
    """Return the weights of a compiled model, with the names that its own `state_dict` gives them."""
    return {f"_orig_mod.{name}": tensor for name, tensor in small_model(seed=3).state_dict().items()}


def load_what_fits(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, compiled_weights(), options=options)
    return {"sum of outputs": model(images()).sum().item()}


def load_under_the_right_names(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in compiled_weights().items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))  # strict
    return {"sum of outputs": model(images()).sum().item()}


def trained_outputs() -> Numbers:
    return {"sum of outputs": small_model(seed=3)(images()).sum().item()}


# ---------------------------------------------------------------- filled, and not handed over


def fill_a_copy(rank: int, world_size: int) -> Numbers:
    model, saved = in_units(small_model()), in_units(small_model(seed=3))
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True, full_state_dict=True))
    state.update(get_model_state_dict(saved, options=StateDictOptions(cpu_offload=True, full_state_dict=True)))
    return {"sum of outputs": model(images()).sum().item()}  # dcp.load filled `state`, but the model doesn't use it


def hand_the_copy_over(rank: int, world_size: int) -> Numbers:
    model, saved = in_units(small_model()), in_units(small_model(seed=3))
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True, full_state_dict=True))
    state.update(get_model_state_dict(saved, options=StateDictOptions(cpu_offload=True, full_state_dict=True)))
    set_model_state_dict(model, state, options=FROM_RANK_0)
    return {"sum of outputs": model(images()).sum().item()}


# ---------------------------------------------------------------- the meta device


def meta_model() -> nn.Module:
    with torch.device("meta"):
        model = small_model()
    return in_units(model)


def move_from_meta(rank: int, world_size: int) -> Numbers:
    model = meta_model().to("cpu")
    set_model_state_dict(model, small_model(seed=3).state_dict(), options=FROM_RANK_0)
    return {"sum of outputs": model(images()).sum().item()}


def allocate_then_load(rank: int, world_size: int) -> Numbers:
    model = meta_model().to_empty(device="cpu")
    set_model_state_dict(model, small_model(seed=3).state_dict(), options=FROM_RANK_0)
    return {"sum of outputs": model(images()).sum().item()}


# ---------------------------------------------------------------- a schedule on each rank

STEPS_DONE = 2


def saved_by_ddp() -> dict:
    """Return the full state of an optimizer whose schedule has reduced the learning rate to a third of 0.01."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = falling(optimizer)
    for _ in range(STEPS_DONE):
        model(images()).square().mean().backward()
        optimizer.step()
        schedule.step()
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def schedule_after_the_load(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    set_optimizer_state_dict(model, optimizer, saved_by_ddp() if rank == 0 else {}, options=FROM_RANK_0)
    schedule = falling(optimizer)
    for _ in range(STEPS_DONE):
        schedule.step()
    return {"learning rate": optimizer.param_groups[0]["lr"]}


def schedule_before_the_load(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = falling(optimizer)
    set_optimizer_state_dict(model, optimizer, saved_by_ddp() if rank == 0 else {}, options=FROM_RANK_0)
    for _ in range(STEPS_DONE):
        schedule.step()
    return {"learning rate": optimizer.param_groups[0]["lr"]}


def a_third() -> Numbers:
    return {"learning rate": 0.01 / (1 + STEPS_DONE)}


# ---------------------------------------------------------------- a parameter that is one number


class Scaled(nn.Module):
    """A model whose outputs are scaled by a learned factor."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.scale = small_model(), nn.Parameter(torch.full(shape, 2.0))

    def forward(self, samples: Tensor) -> Tensor:
        return self.scale * self.layer(samples)


def shard_a_number(rank: int, world_size: int) -> Numbers:
    model = fully_shard(Scaled(), mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def shard_a_row_of_one(rank: int, world_size: int) -> Numbers:
    model = fully_shard(Scaled(1), mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def scaled_alone() -> Numbers:
    return {"sum of outputs": Scaled()(images()).sum().item()}


# ---------------------------------------------------------------- one rank's shards in a file


def write_own_shards(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model(seed=3))
    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: shard.to_local() for name, shard in model.state_dict().items()}, Path(folder, "model.pt"))
        plain = small_model()
        plain.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
    return {"sum of outputs": plain(images()).sum().item()}


def write_full_tensors(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model(seed=3))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    plain = small_model()
    if rank == 0:  # the others' dictionaries are empty
        plain.load_state_dict(state)
    for parameter in plain.parameters():
        dist.broadcast(parameter.detach(), 0)
    return {"sum of outputs": plain(images()).sum().item()}


LOADING = (
    Failure(
        name="save-one-ranks-shards",
        broken=write_own_shards,
        fixed=write_full_tensors,
        right=trained_outputs,
        says="size mismatch for",
    ),
    Failure(
        name="memory-every-rank-loads",
        broken=read_on_every_rank,
        fixed=read_on_rank_0,
        right=one_copy,
    ),
    Failure(
        name="save-not-loaded",
        broken=load_what_fits,
        fixed=load_under_the_right_names,
        right=trained_outputs,
    ),
    Failure(
        name="save-not-set",
        broken=fill_a_copy,
        fixed=hand_the_copy_over,
        right=trained_outputs,
    ),
    Failure(
        name="crash-meta-tensor",
        broken=move_from_meta,
        fixed=allocate_then_load,
        right=trained_outputs,
        says="Cannot copy out of meta tensor",
    ),
    Failure(
        name="wrong-schedule-per-rank",
        broken=schedule_after_the_load,
        fixed=schedule_before_the_load,
        right=a_third,
    ),
    Failure(
        name="crash-scalar-parameter",
        broken=shard_a_number,
        fixed=shard_a_row_of_one,
        right=scaled_alone,
        says="support scalar parameters",
    ),
)
