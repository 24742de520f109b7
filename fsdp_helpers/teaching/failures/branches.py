"""Models that take different paths on different ranks, or when recomputed in backward; a step that fails halfway."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, gradient_norm, images, whole

# ---------------------------------------------------------------- ranks use different parameters


class TwoHeads(nn.Module):
    """A body with two heads; each sample uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1, bias=False) for _ in range(2)])

    def forward(self, samples: Tensor, chosen: int) -> Tensor:
        return self.heads[chosen](self.body(samples))


class BothHeads(TwoHeads):
    """The same model, but every rank computes both heads, in the same order."""

    def forward(self, samples: Tensor, chosen: int) -> Tensor:
        outputs = [head(self.body(samples)) for head in self.heads]
        return outputs[chosen] + 0.0 * outputs[1 - chosen]


def samples_of(rank: int) -> Tensor:
    return images() * (1 + 9 * rank)


def gradients_of(model: TwoHeads, rank: int) -> Numbers:
    model(samples_of(rank), chosen=rank).square().mean().backward()
    parts = {"body": model.body.weight, "head 0": model.heads[0].weight, "head 1": model.heads[1].weight}
    return {f"gradient of {name}": norm_of(parameter.grad) for name, parameter in parts.items()}


def norm_of(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else whole(gradient).norm().item()


def reduce_what_was_used(rank: int, world_size: int) -> Numbers:
    model = TwoHeads()
    fully_shard(model, mesh=cpu_mesh())
    return gradients_of(model, rank)


def reduce_zeros_too(rank: int, world_size: int) -> Numbers:
    model = TwoHeads()
    fully_shard(model, mesh=cpu_mesh())
    model.set_reduce_scatter_unused_params(True)
    return gradients_of(model, rank)


def gradients_alone() -> Numbers:
    model = TwoHeads()
    losses = [model(samples_of(rank), chosen=rank).square().mean() for rank in range(2)]
    (sum(losses) / 2).backward()
    parts = {"body": model.body, "head 0": model.heads[0], "head 1": model.heads[1]}
    return {f"gradient of {name}": norm_of(layer.weight.grad) for name, layer in parts.items()}


def shard_heads(model: TwoHeads) -> TwoHeads:
    for head in model.heads:
        fully_shard(head, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def run_one_head_per_rank(rank: int, world_size: int) -> Numbers:
    return gradients_of(shard_heads(TwoHeads()), rank)


def run_both_heads(rank: int, world_size: int) -> Numbers:
    return gradients_of(shard_heads(BothHeads()), rank)


# ---------------------------------------------------------------- a head that no rank uses, under DDP


def train_one_head(model: nn.Module, rank: int) -> Numbers:
    for _ in range(2):
        model.zero_grad()
        model(samples_of(rank), chosen=0).square().mean().backward()
    return {"gradient norm": gradient_norm_of_body(model)}


def gradient_norm_of_body(model: nn.Module) -> float:
    (body,) = [parameter for name, parameter in model.named_parameters() if name.endswith("body.weight")]
    return norm_of(body.grad)


def leave_a_head_out(rank: int, world_size: int) -> Numbers:
    return train_one_head(DistributedDataParallel(TwoHeads()), rank)


def find_the_unused_head(rank: int, world_size: int) -> Numbers:
    return train_one_head(DistributedDataParallel(TwoHeads(), find_unused_parameters=True), rank)


def one_head_alone() -> Numbers:
    model = TwoHeads()
    losses = [model(samples_of(rank), chosen=0).square().mean() for rank in range(2)]
    (sum(losses) / 2).backward()
    return {"gradient norm": gradient_norm_of_body(model)}


# ---------------------------------------------------------------- a recomputation that takes a different path


class EverySecondTime(nn.Module):
    """A layer with a branch that depends on how many times it's been called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, samples: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.layer(samples)
        return hidden.relu() if self.calls % 2 else hidden


class AsTold(EverySecondTime):
    """The same layer, with the branch chosen by its caller."""

    def forward(self, samples: Tensor, is_odd: bool = True) -> Tensor:
        hidden = self.layer(samples)
        return hidden.relu() if is_odd else hidden


def branch_inside(rank: int, world_size: int) -> Numbers:
    model = fully_shard(EverySecondTime(), mesh=cpu_mesh())
    checkpoint(model, images(), use_reentrant=False).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def branch_outside(rank: int, world_size: int) -> Numbers:
    model = fully_shard(AsTold(), mesh=cpu_mesh())
    checkpoint(model, images(), True, use_reentrant=False).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def first_branch_alone() -> Numbers:
    model = AsTold()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- a step that failed in the middle


class OutOfMemory(torch.autograd.Function):
    """An identity that fails in backward, as an allocation might."""

    @staticmethod
    def forward(ctx: object, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory in backward")


def two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def fail_once(model: nn.Module) -> None:
    handle = model[0].register_forward_hook(lambda module, inputs, output: OutOfMemory.apply(output))
    try:
        model(images()).square().mean().backward()
    except torch.OutOfMemoryError:
        handle.remove()


def sharded_blocks() -> nn.Module:
    model = two_blocks()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=cpu_mesh())
    return model


def step_after_the_failure(rank: int, world_size: int) -> Numbers:
    model = sharded_blocks()
    fail_once(model)
    model.zero_grad()
    return next_step(model, rank)


def reset_after_the_failure(rank: int, world_size: int) -> Numbers:
    model = sharded_blocks()
    fail_once(model)
    model.reset_iter_state()
    model.zero_grad()
    return next_step(model, rank)


def next_step(model: nn.Module, rank: int) -> Numbers:
    with trace_collectives() as events:
        model(images()[rank::2]).square().mean().backward()
    return {"gradient norm": gradient_norm(model), "reductions": sum(event.op == "reduce_scatter" for event in events)}


def step_alone() -> Numbers:
    model = two_blocks()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model), "reductions": 2}  # one for each layer


BRANCHES = (
    Failure(
        name="wrong-unused-parameters",
        broken=reduce_what_was_used,
        fixed=reduce_zeros_too,
        right=gradients_alone,
        since="2.13",
    ),
    Failure(
        name="crash-unused-parameters",
        broken=leave_a_head_out,
        fixed=find_the_unused_head,
        right=one_head_alone,
        says="Expected to have finished reduction",
    ),
    Failure(
        name="wrong-unused-units",
        broken=run_one_head_per_rank,
        fixed=run_both_heads,
        right=gradients_alone,
    ),
    Failure(
        name="crash-checkpoint-branch",
        broken=branch_inside,
        fixed=branch_outside,
        right=first_branch_alone,
        says="A different number of tensors was saved",
    ),
    Failure(
        name="memory-after-oom",
        broken=step_after_the_failure,
        fixed=reset_after_the_failure,
        right=step_alone,
        since="2.15",
    ),
)
