"""It trains, but wrongly: ranks that start apart, buffers without content, an optimiser of the wrong tensors."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.teaching.lessons.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.lessons.failures.pieces import WIDTH, cpu_mesh, images, in_units, small_model

# ---------------------------------------------------------------- the start


def whole_norm(model: nn.Module) -> Numbers:
    return {"norm of the first weight": model[0].weight.full_tensor().norm().item()}


def start_from_different_seeds(rank: int, world_size: int) -> Numbers:
    return whole_norm(in_units(small_model(seed=rank)))


def start_from_one_seed(rank: int, world_size: int) -> Numbers:
    return whole_norm(in_units(small_model(seed=0)))


def start_alone() -> Numbers:
    return {"norm of the first weight": small_model(seed=0)[0].weight.norm().item()}


class Rotated(nn.Module):
    """A layer with a table that is computed, not learned, as rotary positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        self.angles.copy_(torch.arange(WIDTH) + 1.0)


def start_on_meta() -> Rotated:
    with torch.device("meta"):
        model = Rotated()
    return fully_shard(model, mesh=cpu_mesh()).to_empty(device="cpu")


def leave_buffers_empty(rank: int, world_size: int) -> Numbers:
    model = start_on_meta()
    nn.init.ones_(model.layer.weight)
    return {"sum of angles": model.angles.sum().item()}


def fill_buffers_too(rank: int, world_size: int) -> Numbers:
    model = start_on_meta()
    nn.init.ones_(model.layer.weight)
    model.fill_buffers()
    return {"sum of angles": model.angles.sum().item()}


def angles_alone() -> Numbers:
    return {"sum of angles": Rotated().angles.sum().item()}


# ---------------------------------------------------------------- the optimiser


def loss_falls_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    losses = []
    for _ in range(3):
        loss = model(images()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss falls by": losses[0] - losses[-1]}


def optimizer_before_sharding(rank: int, world_size: int) -> Numbers:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loss_falls_by(in_units(model), optimizer)


def optimizer_after_sharding(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loss_falls_by(model, optimizer)


def optimizer_alone() -> Numbers:
    model = small_model()
    return loss_falls_by(model, torch.optim.SGD(model.parameters(), lr=0.1))


WRONG_START = (
    Failure(
        name="wrong-different-seeds",
        title="The first loss is worse than that of one process",
        why="DDP and FSDP1's `sync_module_states` send rank 0's weights around. `fully_shard` sends nothing: each rank keeps "
        "the slice of its own initial model, and the whole is a patchwork. Copies under hybrid sharding start apart, too.",
        tell="Compare the norm of a whole parameter with that in one process.",
        fix="The same seed on every rank until the model is built; or load rank 0's state with "
        "`set_model_state_dict` and `broadcast_from_rank0`.",
        broken=start_from_different_seeds,
        mended=start_from_one_seed,
        right=start_alone,
    ),
    Failure(
        name="wrong-meta-buffers",
        title="A model from the meta device computes nonsense",
        why="`to_empty` gives every tensor memory without content. Your initialisation fills parameters; a buffer that is "
        "computed in `__init__`, such as rotary positions, stays empty, and a checkpoint without it does not help.",
        tell="Compare `named_buffers()` with those of a model built on the CPU.",
        fix="Keep the computation in a method, and call it after `to_empty`.",
        broken=leave_buffers_empty,
        mended=fill_buffers_too,
        right=angles_alone,
    ),
    Failure(
        name="wrong-optimizer-first",
        title="The loss does not move",
        why="`fully_shard` replaces the model's parameters. An optimiser built before holds the old tensors, which get no "
        "gradient any more. No error is raised.",
        tell="`optimizer.param_groups[0]['params'][0] is next(model.parameters())` is false.",
        fix="Shard first, then build the optimiser.",
        broken=optimizer_before_sharding,
        mended=optimizer_after_sharding,
        right=optimizer_alone,
    ),
)
