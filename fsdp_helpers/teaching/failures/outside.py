"""Code that bypasses the hooks of a wrapper or a unit, runs them twice, or does something they don't expect."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, gradient_norm, images, in_units, small_model

# ---------------------------------------------------------------- DDP's wrapper is left out


def train_the_module(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(small_model())
    model.module(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def train_the_wrapper(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(small_model())
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def norm_alone() -> Numbers:
    model = small_model()
    model(images()).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- DDP's hooks run twice


class Recomputed(nn.Module):
    """A model whose last layers are recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = small_model(), use_reentrant

    def forward(self, samples: Tensor) -> Tensor:
        hidden = self.layers[:2](samples)
        return checkpoint(self.layers[2:], hidden, use_reentrant=self.use_reentrant)


def recompute_reentrantly(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(Recomputed(use_reentrant=True), find_unused_parameters=True)
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


def recompute_without_reentry(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(Recomputed(use_reentrant=False), find_unused_parameters=True)
    model(images()[rank::world_size]).square().mean().backward()
    return {"gradient norm": gradient_norm(model)}


# ---------------------------------------------------------------- an operation that DTensor doesn't know


def count_values_of_shards(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    return {"different values": float(model[0].weight.detach().unique().numel())}


def count_values_of_the_full_tensor(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    return {"different values": float(model[0].weight.full_tensor().detach().unique().numel())}


def values_alone() -> Numbers:
    return {"different values": float(small_model()[0].weight.detach().unique().numel())}


# ---------------------------------------------------------------- inputs in one format, weights in another


def feed_fp32_into_bf16(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model().to(torch.bfloat16))
    return {"outputs": float(model(images()).numel())}


def let_the_policy_cast(rank: int, world_size: int) -> Numbers:
    model = small_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    return {"outputs": float(model(images()).numel())}


def two_per_image() -> Numbers:
    return {"outputs": 2.0 * len(images())}


# ---------------------------------------------------------------- an evaluation that keeps its graphs


def add_up_losses(rank: int, world_size: int) -> Numbers:
    model, batches = small_model(), images().split(2)
    with trace_memory() as trace:
        total = torch.zeros(())
        for batch in batches:
            total = total + model(batch).square().mean()
    return {"bytes kept": trace.whole().curve.held_bytes}


def add_up_losses_without_graphs(rank: int, world_size: int) -> Numbers:
    model, batches = small_model(), images().split(2)
    with trace_memory() as trace, torch.no_grad():
        total = torch.zeros(())
        for batch in batches:
            total = total + model(batch).square().mean()
    return {"bytes kept": trace.whole().curve.held_bytes}


def one_number() -> Numbers:
    return {"bytes kept": 4}


OUTSIDE = (
    Failure(
        name="wrong-unwrapped-module",
        title="Each rank trains its own model",
        why=(
            "DDP reduces gradients in hooks that the wrapper's `forward` prepares. `model.module(batch)`, or an "
            "earlier `model = model.module`, bypasses the wrapper, so no gradients are sent, and no error is raised."
        ),
        tell="If you delay one rank, the others don't wait for it. After a step, the ranks' parameters differ.",
        fix=(
            "Call the wrapper in training: `loss = model(batch)`. Use `model.module` only to save, or to evaluate on "
            "one rank."
        ),
        numbers=(
            "parameters and gradients differ from rank to rank under DDP",
            "the ranks' checksums, norms or weights are different after a few steps under DDP",
        ),
        behavior=(
            "gradients are not synchronized: each GPU or node trains independently, with no communication in a step",
            (
                "each GPU trains on its own; losses and weights diverge across ranks; model.module is called instead "
                "of the model"
            ),
            "gradients are not synchronized across different ranks; weights are different on each rank",
            "the gradient reduction doesn't work: autograd.grad is used, or a parameter is used outside forward",
            "DistributedDataParallel does not get the same grad",
            (
                "model.module, a submodule, a loss method or self.model instead of the wrapper: each GPU ends up with "
                "its own weights"
            ),
            "training runs separately in each process; n independent models; model weights on each GPU are different",
            "a custom forward, training_step or compute_loss bypasses DDP",
            "gradients of different ranks are not averaged or all-reduced; the models on rank 0 and rank 1 diverge",
        ),
        quotes={
            "a run on the CPU": (
                "'DistributedDataParallel' object has no attribute",
                "'FullyShardedDataParallel' object has no attribute",
                "'DataParallel' object has no attribute",
                "object has no attribute 'module'",
            ),
        },
        broken=train_the_module,
        fixed=train_the_wrapper,
        right=norm_alone,
    ),
    Failure(
        name="crash-ready-twice",
        title="Expected to mark a variable ready only once",
        why=(
            "DDP counts each parameter's gradient once per backward pass. Reentrant activation checkpointing starts a "
            "second backward pass inside the first, which DDP's search for unused parameters doesn't know about. Using "
            "a module twice has the same effect."
        ),
        tell=(
            "The error occurs with `use_reentrant=True`, the old default of transformers' gradient checkpointing, but "
            "not without checkpointing. `TORCH_DISTRIBUTED_DEBUG=DETAIL` names the parameter."
        ),
        fix=(
            "Use `checkpoint(layer, x, use_reentrant=False)`. In transformers, pass "
            "`gradient_checkpointing_kwargs={'use_reentrant': False}`."
        ),
        messages=("Expected to mark a variable ready only once",),
        behavior=(
            "gradient checkpointing crashes under DDP; use_reentrant",
            "gradient checkpointing and DDP, with find_unused_parameters=True, fail in backward",
            (
                "under DDP, a module or shared layer is used twice in one forward pass, a weight is reused, or two "
                "losses have two backward passes"
            ),
            "LoRA with gradient_checkpointing under DDP",
        ),
        quotes={
            "a run on the CPU": (
                "has been marked as ready twice",
                "Use of a module parameter outside the `forward` function",
                "Reused parameters in multiple reentrant backward passes",
                "_set_static_graph() as a workaround",
                "multiple autograd engine hooks have fired",
                "Multiple autograd engine  hooks",
                "the use_reentrant parameter should be passed explicitly",
            ),
        },
        broken=recompute_reentrantly,
        fixed=recompute_without_reentry,
        right=norm_alone,
        says="Expected to mark a variable ready only once",
    ),
    Failure(
        name="crash-no-sharding-strategy",
        title="Sharding propagation failed: an operation that DTensor doesn't know",
        why=(
            "DTensor needs a rule for how each operation works on shards. Rare operations, which turn up in logged "
            "statistics, custom optimizers and initialization code, don't have one."
        ),
        tell="The message names the operation, which starts with `aten.`. Before `fully_shard`, the same line works.",
        fix=(
            "If the operation is elementwise, apply it to the shard, `parameter.to_local()`. Otherwise, use "
            "`parameter.full_tensor()` on every rank."
        ),
        messages=("Sharding propagation failed for",),
        behavior=(
            "an optimizer step or logging code fails on DTensor parameters",
            (
                "an operator isn't supported by DTensor; NotImplementedError in the optimizer's step, in init or in a "
                "custom kernel"
            ),
            "a fused or custom optimizer (8-bit Adam, Adafactor, Shampoo) fails on DTensors",
        ),
        quotes={
            "a run on the CPU": ("'DTensor' object has no attribute",),
            "torch/distributed/tensor/_sharding_prop.py": (
                "does not have a sharding strategy registered",
                "does not have a sharding strategy",
            ),
        },
        broken=count_values_of_shards,
        fixed=count_values_of_the_full_tensor,
        right=values_alone,
        says="Sharding propagation failed",
    ),
    Failure(
        name="crash-dtype-mismatch",
        title="mat1 and mat2 must have the same dtype",
        why=(
            "The weights are in bf16 and an input is in fp32, or the other way around. `MixedPrecisionPolicy` casts "
            "the inputs to a unit's `forward`. The policy doesn't help if you converted the model by hand, or if a "
            "layer gets its input from outside that `forward`."
        ),
        tell=(
            "Print `x.dtype` and `layer.weight.dtype` on the line that fails. An adapter, a norm in fp32 or a value "
            "head is often the culprit."
        ),
        fix=(
            "Keep the model in fp32 and compute in bf16: "
            "`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. If only one layer "
            "differs, cast its input: `layer(x.to(layer.weight.dtype))`."
        ),
        messages=("mat1 and mat2 must have the same dtype, but got Float and BFloat16",),
        behavior=(
            "LoRA, QLoRA or a value head fails in its first linear layer under FSDP with bf16",
            "a dtype error in mixed precision: float, half and bfloat16 meet in a layer",
            "an input, a norm, an embedding or a timestep is in float32 while the weights are in bfloat16 or half",
            (
                "FSDP with fp16 or bf16: a layer called outside forward, a frozen part or a custom buffer has a "
                "different dtype"
            ),
            "autocast and mixed_precision are used together; buffers in a different precision",
        ),
        quotes={
            "a run on the CPU": (
                "Input type (float) and bias type (c10::BFloat16) should be the same",
                "Expected query, key, and value to have the same dtype",
                "expected scalar type Half but found Float",
                "expected scalar type BFloat16 but found Float",
                "expected scalar type Float but found BFloat16",
                "expected m1 and m2 to have the same dtype",
                "mat1 and mat2 must have the same dtype",
                "Input type (c10::BFloat16) and bias type (float) should be the same",
                "self and mat2 must have the same dtype",
                "must have the same dtype",
                "Index put requires the source and destination dtypes match",
                "Input type (float) and bias type",
                "Input type (c10::Half) and bias type",
                "not implemented for 'Half'",
            ),
            "torch's flash attention": ("FlashAttention only support fp16 and bf16 data type",),
            "torch's LinearAlgebra.cpp": ("expected mat1 and mat2 to have the same dtype",),
            "torch's Convolution.cpp": (
                "Input type (torch.cuda.FloatTensor) and weight type",
                "Input type (torch.cuda.HalfTensor) and weight type",
            ),
            "an older PyTorch": ("for scaled_dot_product_attention to have the same dtype",),
        },
        broken=feed_fp32_into_bf16,
        fixed=let_the_policy_cast,
        right=two_per_image,
        says="must have the same dtype",
    ),
    Failure(
        name="memory-graph-kept",
        title="Memory grows with every batch of an evaluation",
        why=(
            "Without `torch.no_grad()`, a forward pass keeps its activations for backward. If you add the loss tensor "
            "to a running total, the total keeps every batch's graph alive, with all its tensors."
        ),
        tell=(
            "`total.grad_fn` isn't None. Memory grows by the same amount with every batch, and runs out during "
            "evaluation."
        ),
        fix="Put `with torch.no_grad():` around the evaluation loop, and write `total += loss.detach()` in training.",
        numbers=(
            "memory grows by the same amount with every batch",
            "GPU memory rises step by step and never falls",
        ),
        behavior=(
            "out of memory in evaluation or validation, while training fits; a memory leak from step to step",
            (
                "GPU memory increases every iteration until out of memory after many steps; a memory leak; losses or "
                "outputs are kept in a list"
            ),
            "memory leak in multi-GPU training: out of memory after many iterations",
            "memory usage keeps growing during training; each iteration is slower and takes more GPU memory",
            "the loss, outputs or hidden states are accumulated, logged or appended without detach() or item()",
            "validation without torch.no_grad runs out of memory; no_grad is missing",
            "gathered predictions stay on the GPU during evaluation; eval_accumulation_steps",
        ),
        quotes={
            "torch's CUDACachingAllocator.cpp": ("CUDA out of memory. Tried to allocate",),
        },
        broken=add_up_losses,
        fixed=add_up_losses_without_graphs,
        right=one_number,
    ),
)
