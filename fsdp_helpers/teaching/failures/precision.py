"""Number formats: weights without fp32 masters, a loss that overflows, a unit with two formats."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, gradient_norm, images, small_model, whole

# ---------------------------------------------------------------- no fp32 masters


def share_that_changes(model: nn.Module, dtype: torch.dtype) -> Numbers:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    before = [whole(parameter).detach().clone() for parameter in model.parameters()]
    for _ in range(10):
        model(images().to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = [(whole(new) != old).flatten() for new, old in zip(model.parameters(), before, strict=True)]
    return {"weights that change in ten steps, %": 100 * torch.cat(changed).float().mean().item()}


def train_a_model_loaded_in_bf16(rank: int, world_size: int) -> Numbers:
    model = small_model().to(torch.bfloat16)  # as from_pretrained(..., torch_dtype=torch.bfloat16)
    fully_shard(model, mesh=cpu_mesh())
    return share_that_changes(model, torch.bfloat16)


def train_a_model_loaded_in_fp32(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return share_that_changes(model, torch.bfloat16)


def all_of_them() -> Numbers:
    return {"weights that change in ten steps, %": 100.0}


# ---------------------------------------------------------------- overflow


def norm_after_backward(model: nn.Module) -> Numbers:
    model(10_000 * images()).square().mean().backward()  # squares of a few hundred: above fp16's 65,504
    return {"gradient norm": gradient_norm(model)}


def compute_in_fp16(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    return norm_after_backward(model)


def compute_in_bf16(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return norm_after_backward(model)


def norm_in_fp32() -> Numbers:
    return norm_after_backward(small_model())


# ---------------------------------------------------------------- two formats in one unit


class Adapted(nn.Module):
    """A model in bf16 with an adapter in fp32, as PEFT creates it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = small_model().to(torch.bfloat16)
        self.adapter = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.base(inputs.to(next(self.base.parameters()).dtype))
        return self.adapter(hidden.to(next(self.adapter.parameters()).dtype))


def shard_two_formats(rank: int, world_size: int) -> Numbers:
    model = Adapted()
    fully_shard(model, mesh=cpu_mesh())
    return {"outputs": float(model(images()).numel())}


def shard_one_format(rank: int, world_size: int) -> Numbers:
    model = Adapted().float()
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return {"outputs": float(model(images()).numel())}


def two_outputs_per_image() -> Numbers:
    return {"outputs": 2.0 * len(images())}


PRECISION = (
    Failure(
        name="wrong-bf16-masters",
        broken=train_a_model_loaded_in_bf16,
        fixed=train_a_model_loaded_in_fp32,
        right=all_of_them,
    ),
    Failure(
        name="wrong-fp16-nan",
        broken=compute_in_fp16,
        fixed=compute_in_bf16,
        right=norm_in_fp32,
        tolerance=0.02,  # bf16 rounds to three digits
    ),
    Failure(
        name="crash-uniform-dtype",
        broken=shard_two_formats,
        fixed=shard_one_format,
        right=two_outputs_per_image,
        says="uniform original parameter dtype",
    ),
)
