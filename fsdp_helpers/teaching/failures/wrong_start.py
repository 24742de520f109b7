"""Wrong results without an error: ranks with different initial values, uninitialized buffers, or replaced tensors."""

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
        title="The first loss is worse than in one process",
        why=(
            "DDP and FSDP1's `sync_module_states` broadcast rank 0's weights. `fully_shard` doesn't send anything: "
            "each rank keeps a shard of its own initial model, so the full model is a patchwork. Under hybrid "
            "sharding, the copies of the model also start with different values."
        ),
        tell="Compare the norm of a full parameter with its norm in a single-process run.",
        fix=(
            "Use the same seed on every rank until the model is built, or load rank 0's state with "
            "`set_model_state_dict` and `broadcast_from_rank0`."
        ),
        numbers=(
            "the first loss is worse than in one process",
            "the loss is higher and stagnates earlier: ranks start from different initial weights",
        ),
        behavior=(
            "the model was built without a seed (manual_seed), and FSDP does not synchronize it across ranks",
            "weights differ between ranks at the start; parameters are not synchronized",
            (
                "ranks draw different initial weights; no broadcast from rank 0; the seed is set to seed + rank before "
                "the model is built"
            ),
            "the model is initialized differently on each GPU under fully_shard",
        ),
        broken=start_from_different_seeds,
        fixed=start_from_one_seed,
        right=start_alone,
    ),
    Failure(
        name="wrong-meta-buffers",
        title="A model from the meta device computes nonsense",
        why=(
            "`to_empty` gives every tensor uninitialized memory. Your initialization fills the parameters, but a "
            "buffer that's computed in `__init__`, such as rotary frequencies, keeps whatever was in that memory. "
            "Loading a checkpoint doesn't help if the checkpoint doesn't contain the buffer."
        ),
        tell="Compare the model's `named_buffers()` with the buffers of a model built on the CPU.",
        fix="Move the computation into a method, and call that method after `to_empty`.",
        numbers=(
            "NaN or nonsense from the first step, with a model from the meta device",
            "the loss is about ln(vocabulary) and stays there",
        ),
        behavior=(
            "a loaded model from the meta device generates nonsense: rotary positions",
            "random accuracy, garbage output or NaN after loading with param_init_fn, to_empty or sync_module_states",
            "buffers such as inv_freq, freqs_cis, rotary embeddings or masks are uninitialized after to_empty",
            "non-persistent buffers aren't in the checkpoint",
            "meta device: the loss is NaN or huge from the first step",
        ),
        broken=leave_buffers_empty,
        fixed=fill_buffers_too,
        right=angles_alone,
    ),
    Failure(
        name="wrong-optimizer-first",
        title="The loss doesn't move",
        why=(
            "`fully_shard` replaces the model's parameters. An optimizer built earlier still holds the old tensors, "
            "which no longer receive gradients. No error is raised."
        ),
        tell="`optimizer.param_groups[0]['params'][0] is next(model.parameters())` is false.",
        fix="Shard the model first, and then build the optimizer.",
        numbers=(
            "the loss does not move, does not decrease; parameters are not updating",
            "grad_norm is 0; gradients are None",
            "grad_norm is 0.0 in every step",
        ),
        behavior=(
            "FSDP2: weights are not updating after fully_shard",
            "loss doesn't decrease, stays constant or stagnates under FSDP; the model doesn't learn",
            "gradients are None or zero for most layers after sharding",
            "the loss is not going down; the weights do not change after optimizer.step()",
            "the optimizer was created before FSDP, fully_shard, prepare, .to(device) or a replaced layer",
            (
                "the loss stays flat, bounces around the initial value or is constant; the parameters are not being "
                "updated"
            ),
            "grad is None for all parameters of the optimizer; weights identical before and after the step",
        ),
        quotes={
            "a run on the CPU": (
                "No inf checks were recorded for this optimizer",
                "AssertionError: No inf checks were recorded",
            ),
            "accelerate": (
                "the optimizer parameters are not on the same device",
                "a model and optimizer must be passed together to",
            ),
        },
        broken=optimizer_before_sharding,
        fixed=optimizer_after_sharding,
        right=optimizer_alone,
    ),
    Failure(
        name="wrong-filled-dict",
        title="The distance from the pretrained weights stays zero",
        why=(
            "`set_model_state_dict` writes into the dictionary that you pass. After the call, the dictionary holds "
            "DTensors. With `broadcast_from_rank0`, these are the model's own parameters, so they change in every "
            "training step. No error is raised."
        ),
        tell="`type(next(iter(weights.values())))` is `Tensor` before the call and `DTensor` after it.",
        fix="Pass a copy, `dict(weights)`, or read the file again. The copy is shallow, so it duplicates no tensors.",
        numbers=("the distance from the pretrained weights stays zero",),
        broken=hand_over_the_weights,
        fixed=hand_over_a_copy,
        right=distance_alone,
    ),
)
