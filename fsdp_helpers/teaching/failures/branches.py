"""Models that take a different path on each rank or in recomputation, and a step that fails halfway."""

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
    """A body with two heads; every rank computes both heads, in the same order."""

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
    """A layer with a branch that depends on how many times the layer has been called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, samples: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.layer(samples)
        return hidden.relu() if self.calls % 2 else hidden


class AsTold(EverySecondTime):
    """A layer whose branch is chosen by its caller."""

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
    """An identity function that fails in backward, as a memory allocation might."""

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
        title="Ranks use different heads, and their gradients are mixed up",
        why=(
            "FSDP2 packs whatever gradients a unit has into one buffer and reduces the buffer. Here, rank 0 has a "
            "gradient for head 0, and rank 1 has one for head 1. Both gradients end up in the same place in the buffer "
            "and are added together, without an error. Under DDP, `find_unused_parameters=True` prevents this."
        ),
        tell="One head's gradient includes the other head's. Compare with a run in one process or under DDP.",
        fix=(
            "Call `model.set_reduce_scatter_unused_params(True)` (PyTorch 2.13 or later), so that parameters without "
            "a gradient contribute zeros."
        ),
        numbers=("gradients of two heads or experts are mixed up: 11 and 11 instead of 1 and 10",),
        behavior=(
            "ranks use different heads; find_unused_parameters has no counterpart in FSDP2",
            "only some ranks use a head, an expert or a modality under FSDP2: there's no find_unused_parameters",
        ),
        broken=reduce_what_was_used,
        fixed=reduce_zeros_too,
        right=gradients_alone,
        since="2.13",
    ),
    Failure(
        name="crash-unused-parameters",
        title="Expected to have finished reduction in the prior iteration before starting a new one",
        why=(
            "DDP waits for the gradient of every parameter. A head, branch or modality that a step doesn't use gets no "
            "gradient, and neither does a layer whose output isn't part of the loss. The next forward pass then finds "
            "the reduction unfinished."
        ),
        tell=(
            "Run one backward pass without DDP, and print `[n for n, p in model.named_parameters() if p.requires_grad "
            "and p.grad is None]`. `TORCH_DISTRIBUTED_DEBUG=DETAIL` also names these parameters."
        ),
        fix=(
            "Use `DistributedDataParallel(model, find_unused_parameters=True)`. Better yet, freeze or remove layers "
            "that are never used, or add `0.0 * output.sum()` to the loss. If the unused parameters are the same in "
            "every step, pass `static_graph=True`. Under FSDP2, see "
            "[wrong-unused-parameters](#wrong-unused-parameters)."
        ),
        messages=(
            "Expected to have finished reduction in the prior iteration before starting a new one",
            "your module has parameters that were not used in producing loss",
        ),
        behavior=(
            "some parameters get no gradient in some steps, under DDP",
            "a branch, a head, a modality or an expert isn't used in some steps or on some ranks under DDP",
            "parameters that receive no gradient: a frozen or unused layer, an output that isn't in the loss",
            "the model has conditional parts; DDP fails in the second iteration",
            "find_unused_parameters, static_graph",
            "DDP fails in the second iteration or step",
        ),
        quotes={
            "a run on the CPU": (
                "Parameter indices which did not receive grad for rank",
                "passing the keyword argument `find_unused_parameters=True`",
                "making sure all `forward` function outputs participate in calculating loss",
                "Parameters which did not receive grad for rank",
                "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
                "this is not compatible with static_graph set to True",
                "your training graph has changed in this iteration",
                "unused parameter detection",
            ),
            "torch's reducer.cpp": ("Since `find_unused_parameters=True` is enabled",),
        },
        broken=leave_a_head_out,
        fixed=find_the_unused_head,
        right=one_head_alone,
        says="Expected to have finished reduction",
    ),
    Failure(
        name="wrong-unused-units",
        title="Each rank runs a different unit: experts, heads, LayerDrop",
        why=(
            "A unit all-gathers its parameters when it's called. If rank 0 calls one unit while rank 1 calls a "
            "different one, the two all-gathers are matched with each other, and each rank gets half of one layer and "
            "half of the other. If the shapes differ, gloo aborts and NCCL hangs. This happens with a vision tower "
            "that's skipped when a batch has no images, or with an expert that gets no tokens."
        ),
        tell="Trace the forward pass on each rank: the ranks call different units, or a different number of units.",
        fix=(
            "Call every unit on every rank, in the same order. If you don't need a unit's output, call the unit on a "
            "dummy input and give its output a weight of 0: `loss + 0.0 * tower(blank).sum()`. Or, if only some ranks "
            "use a layer, leave that layer in the root unit and call `set_reduce_scatter_unused_params(True)`."
        ),
        numbers=("a shared body's gradient is wrong where ranks run different experts",),
        behavior=(
            "LayerDrop, experts or skipped layers: training hangs with NCCL, aborts with gloo, or gives wrong results",
            (
                "some batches have no image, audio or video: that rank skips the vision tower or encoder, and FSDP "
                "freezes"
            ),
            (
                "training hangs under FSDP or ZeRO-3 with text-only batches, mixed modalities or a multimodal data "
                "set; a dummy input helps"
            ),
            "a mixture of experts hangs or freezes: an expert without tokens on one rank isn't called",
            "conditional computation: an if in forward calls a module only on some ranks; sometimes it freezes",
            "stochastic depth, early exit or layer skipping with FSDP",
        ),
        quotes={
            "torch/distributed/fsdp/_flat_param.py": (
                "Only some but not all ranks have a `None` `FlatParameter` gradient",
            ),
        },
        broken=run_one_head_per_rank,
        fixed=run_both_heads,
        right=gradients_alone,
    ),
    Failure(
        name="crash-checkpoint-branch",
        title="A different number of tensors was saved during the original forward and recomputation",
        why=(
            "Activation checkpointing repeats the forward pass during backward and expects the same operations. If the "
            "code branches on a counter, a cache (`use_cache=True`) or a random number drawn outside torch, the second "
            "forward pass takes a different path."
        ),
        tell="`torch.utils.checkpoint.set_checkpoint_debug_enabled(True)` prints both lists of operations.",
        fix=(
            "Make the decision outside the checkpointed function and pass it in: `checkpoint(block, x, is_odd, "
            "use_reentrant=False)`."
        ),
        messages=(
            (
                "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
                "recomputation"
            ),
        ),
        behavior=(
            "CheckpointError in backward with activation checkpointing",
            "FSDP with activation checkpointing, or gradient checkpointing, leads to an error in backward",
            "MoE routing, dropout, or another random or data-dependent path differs during recomputation",
            "gradient checkpointing with use_cache, torch.compile, autocast or FlashAttention fails in backward",
            "activation checkpointing is applied in the wrong order, outside FSDP; checkpoint_wrapper",
        ),
        quotes={
            "a run on the CPU": (
                "Recomputed values for the following tensors have different metadata",
                "tensor at position",
                "Number of tensors saved during forward",
                "trying to save more tensors during recomputation than during the original forward pass",
                "torch.utils.checkpoint.CheckpointError",
                "recomputed metadata",
                "Trying to backward through the graph a second time",
                "a second time (or directly access saved tensors after they have already been freed)",
            ),
            "torch/utils/checkpoint.py": (
                "Unpack is being triggered for a tensor that was already unpacked once",
                "Tensor cached during selective activation checkpoint has been mutated",
            ),
        },
        broken=branch_inside,
        fixed=branch_outside,
        right=first_branch_alone,
        says="A different number of tensors was saved",
    ),
    Failure(
        name="memory-after-oom",
        title="After one step runs out of memory, later steps use more memory and give wrong results",
        why=(
            "An exception in the middle of backward leaves FSDP in the state of a backward pass. If you catch the "
            "exception and go on to the next batch, units that were in backward are unsharded in the next forward pass "
            "but never resharded, and their gradients aren't reduced: here, each rank holds full parameters and full "
            "gradients. No error is raised."
        ),
        tell=(
            "Between steps, memory use is higher than before the failure, and `type(next(model.parameters()))` isn't "
            "DTensor."
        ),
        fix=(
            "After catching the exception, call `model.reset_iter_state()` on the root (PyTorch 2.15 or later), and "
            "then `zero_grad()`, on every rank."
        ),
        numbers=("memory is several GB higher after a step has run out of memory; later steps have no reduce-scatter",),
        behavior=(
            "out of memory once, then in every step",
            (
                "the out of memory error is caught and training goes on with the next batch; after that, memory use is "
                "higher, or everything fails"
            ),
            "auto_find_batch_size or try/except around a step with FSDP",
        ),
        broken=step_after_the_failure,
        fixed=reset_after_the_failure,
        right=step_alone,
        since="2.15",
    ),
)
