"""It trains, but wrongly: ranks that start with different values, uninitialized buffers, replaced tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, images, in_units, small_model, whole

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
    """A layer with a table that is computed, not learned, like rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        self.angles.copy_(torch.arange(WIDTH) + 1.0)


def rotated_on_meta() -> Rotated:
    with torch.device("meta"):
        model = Rotated()
    return fully_shard(model, mesh=cpu_mesh()).to_empty(device="cpu")


def leave_buffers_empty(rank: int, world_size: int) -> Numbers:
    model = rotated_on_meta()
    nn.init.ones_(model.layer.weight)
    return {"sum of angles": model.angles.sum().item()}


def fill_buffers_too(rank: int, world_size: int) -> Numbers:
    model = rotated_on_meta()
    nn.init.ones_(model.layer.weight)
    model.fill_buffers()
    return {"sum of angles": model.angles.sum().item()}


def angles_alone() -> Numbers:
    return {"sum of angles": Rotated().angles.sum().item()}


# ---------------------------------------------------------------- the optimizer


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


# ---------------------------------------------------------------- a dictionary that is filled

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def pretrained() -> dict[str, Tensor]:
    return small_model(seed=3).state_dict()


@torch.no_grad()
def distance_after_a_step(model: nn.Module, start: Mapping[str, Tensor]) -> Numbers:
    with torch.enable_grad():
        model(images()).square().mean().backward()
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
    moved = [whole(parameter) - whole(start[name]) for name, parameter in model.named_parameters()]
    return {"distance from the start": nn.utils.get_total_norm(moved).item()}


def hand_over_the_weights(rank: int, world_size: int) -> Numbers:
    model, weights = in_units(small_model()), pretrained()
    set_model_state_dict(model, weights, options=FROM_RANK_0)
    return distance_after_a_step(model, weights)


def hand_over_a_copy(rank: int, world_size: int) -> Numbers:
    model, weights = in_units(small_model()), pretrained()
    set_model_state_dict(model, dict(weights), options=FROM_RANK_0)
    return distance_after_a_step(model, weights)


def distance_alone() -> Numbers:
    return distance_after_a_step(small_model(seed=3), pretrained())


WRONG_START = (
    Failure(
        name="wrong-different-seeds",
        broken=start_from_different_seeds,
        fixed=start_from_one_seed,
        right=start_alone,
    ),
    Failure(
        name="wrong-meta-buffers",
        broken=leave_buffers_empty,
        fixed=fill_buffers_too,
        right=angles_alone,
    ),
    Failure(
        name="wrong-optimizer-first",
        broken=optimizer_before_sharding,
        fixed=optimizer_after_sharding,
        right=optimizer_alone,
    ),
    Failure(
        name="wrong-filled-dict",
        broken=hand_over_the_weights,
        fixed=hand_over_a_copy,
        right=distance_alone,
    ),
)
