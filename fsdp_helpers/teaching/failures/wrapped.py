"""Code that changes a sharded model, or uses it in a way that its hooks and flat parameters don't expect."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, gradient_norm, images, in_units, small_model

CPU = torch.device("cpu")


def norm_alone() -> Numbers:
    model = small_model()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- outputs that the hooks don't see


class Output:
    """Outputs in an object of a class that PyTorch doesn't know."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class WithOutput(nn.Module):
    """A model that returns its outputs in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, samples: Tensor) -> Output:
        return Output(self.layers(samples))


class WithDict(WithOutput):
    """The same model, with its outputs in a dictionary."""

    def forward(self, samples: Tensor) -> dict[str, Tensor]:
        return {"scores": self.layers(samples)}


def flat_norm(model: FullyShardedDataParallel) -> Numbers:
    return {"gradient norm": model.clip_grad_norm_(1e9).item()}


def return_an_object(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(WithOutput(), device_id=CPU)
    model(images()).scores.square().mean().backward()
    return flat_norm(model)


def return_a_dictionary(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(WithDict(), device_id=CPU)
    model(images())["scores"].square().mean().backward()
    return flat_norm(model)


# ---------------------------------------------------------------- a head that is replaced


def replace_the_head_after_wrapping(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(small_model(), device_id=CPU, use_orig_params=True)
    model.module[4].weight = nn.Parameter(torch.ones(3, WIDTH))
    model.module[4].bias = nn.Parameter(torch.ones(3))
    return {"outputs": model(images()).numel()}


def replace_the_head_before(rank: int, world_size: int) -> Numbers:
    model = small_model()
    model[4].weight = nn.Parameter(torch.ones(3, WIDTH))
    model[4].bias = nn.Parameter(torch.ones(3))
    model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    return {"outputs": model(images()).numel()}


def three_per_image() -> Numbers:
    return {"outputs": 3 * len(images())}


# ---------------------------------------------------------------- parameter groups by name


def decayed(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]


def choose_flat_parameters(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(small_model(), device_id=CPU)
    optimizer = torch.optim.AdamW(decayed(model), weight_decay=0.1)
    return {"parameters with decay": len(optimizer.param_groups[0]["params"])}


def choose_original_parameters(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(small_model(), device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.AdamW(decayed(model), weight_decay=0.1)
    return {"parameters with decay": len(optimizer.param_groups[0]["params"])}


def three_weights() -> Numbers:
    return {"parameters with decay": 3}


# ---------------------------------------------------------------- the last micro-batch isn't reduced


def step_on(model: FullyShardedDataParallel) -> None:
    torch.optim.AdamW(model.parameters()).step()


def accumulate_without_an_end(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(small_model(), device_id=CPU)
    micro_batches = images().split(4)
    for batch in micro_batches:
        with model.no_sync():
            (model(batch).square().mean() / len(micro_batches)).backward()
    step_on(model)
    return flat_norm(model)


def reduce_the_last(rank: int, world_size: int) -> Numbers:
    model = FullyShardedDataParallel(small_model(), device_id=CPU)
    micro_batches = images().split(4)
    for number, batch in enumerate(micro_batches, start=1):
        with model.no_sync() if number < len(micro_batches) else nullcontext():
            (model(batch).square().mean() / len(micro_batches)).backward()
    step_on(model)
    return flat_norm(model)


# ---------------------------------------------------------------- a view of an input


def block(in_place: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(WIDTH, 2))


def change_the_input_in_place(rank: int, world_size: int) -> Numbers:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block(in_place=True))
    fully_shard(model[1], mesh=cpu_mesh())
    model(images()).square().mean().backward()
    return {"gradients": sum(parameter.grad is not None for parameter in model.parameters())}


def leave_the_input_alone(rank: int, world_size: int) -> Numbers:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block(in_place=False))
    fully_shard(model[1], mesh=cpu_mesh())
    model(images()).square().mean().backward()
    return {"gradients": sum(parameter.grad is not None for parameter in model.parameters())}


def two_layers() -> Numbers:
    return {"gradients": 2 * 2}


# ---------------------------------------------------------------- no gradient to be had


def adapted() -> nn.Sequential:
    """Return a frozen model with one layer that is trained."""
    model = small_model().requires_grad_(False)
    model[2].requires_grad_(True)
    return model


def checkpoint_reentrantly(rank: int, world_size: int) -> Numbers:
    model = in_units(adapted())
    checkpoint(model, images(), use_reentrant=True).square().mean().backward()
    return {"gradient norm": gradient_norm_of_trained(model)}


def checkpoint_without_reentry(rank: int, world_size: int) -> Numbers:
    model = in_units(adapted())
    checkpoint(model, images(), use_reentrant=False).square().mean().backward()
    return {"gradient norm": gradient_norm_of_trained(model)}


def adapted_alone() -> Numbers:
    model = adapted()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm_of_trained(model)}


def gradient_norm_of_trained(model: nn.Module) -> float:
    return gradient_norm(model[2])


# ---------------------------------------------------------------- the compiler


def compile_all(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def compile_each_layer(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for layer in model:
        layer.compile(backend="eager")
    in_units(model)(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}
