"""Number formats: training without fp32 master weights, a loss that overflows, and a unit with two dtypes."""

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
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
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
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
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
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    return {"outputs": float(model(images()).numel())}


def two_outputs_per_image() -> Numbers:
    return {"outputs": 2.0 * len(images())}


# ---------------------------------------------------------------- a frozen base in fp32


def bytes_of_shards(model: nn.Module) -> Numbers:
    fully_shard(model, mesh=cpu_mesh())
    return {"bytes of parameters, per rank": sum(parameter.to_local().nbytes for parameter in model.parameters())}


def with_frozen_base() -> Adapted:
    model = Adapted()
    model.base.requires_grad_(False)
    return model


def cast_all_parameters(rank: int, world_size: int) -> Numbers:
    model = with_frozen_base()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    return bytes_of_shards(model)


def cast_trained_parameters(rank: int, world_size: int) -> Numbers:
    model = with_frozen_base()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    return bytes_of_shards(model)


def half_of_the_model() -> Numbers:
    return {"bytes of parameters, per rank": sum(parameter.nbytes for parameter in Adapted().parameters()) / 2}


PRECISION = (
    Failure(
        name="wrong-bf16-masters",
        title="A model loaded in bf16 hardly learns",
        why=(
            "bf16 keeps 8 significant bits, so an update below about 1/256 of a weight is rounded away. With a "
            "learning rate of 1e-5, that's nearly every update. `fully_shard` keeps weights, gradients and Adam's "
            "state in the dtype that the model was loaded in. No error is raised."
        ),
        tell=(
            "The optimizer's parameters are in bf16: print `next(model.parameters()).dtype`. Count how many weights a "
            "step changes."
        ),
        fix=(
            "Load the model in fp32, and compute in bf16: `fully_shard(model, "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))`."
        ),
        numbers=("a few percent of the weights change in a step",),
        behavior=(
            "bad convergence with bf16: a model loaded with torch_dtype=torch.bfloat16 learns worse, or not at all",
            "loss plateaus or fine-tuning is worse in pure bf16; parameters and optimizer state are bf16",
            "bfloat16 training: the loss plateaus higher than in fp32; AdamW on bf16 parameters inherits their dtype",
            (
                "pure bf16 or fp16 training doesn't converge as well as fp32; the update is rounded away; no master "
                "weights"
            ),
            "the loss is stuck or noisy in bf16, but fine in fp32 or with autocast",
            "model.to(torch.bfloat16) or .half() is called before the optimizer is created",
        ),
        broken=train_a_model_loaded_in_bf16,
        fixed=train_a_model_loaded_in_fp32,
        right=all_of_them,
    ),
    Failure(
        name="wrong-fp16-nan",
        title="The loss becomes NaN in mixed precision",
        why=(
            "The largest fp16 number is 65,504. Larger activations, losses and gradients become inf, and inf - inf is "
            "NaN. Small gradients become 0. A `GradScaler` keeps small gradients from becoming 0 and skips steps in "
            "which a gradient overflowed. All ranks have to skip the same steps. Using `torch.autocast` on top of a "
            "`MixedPrecisionPolicy` casts twice."
        ),
        tell=(
            "Check the loss and each layer's output with `torch.isfinite`, and find the first one that isn't finite. "
            "In bf16, the same step is finite."
        ),
        fix=(
            "Use `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, since bf16 has the "
            "same range as fp32. If you have to use fp16, use `torch.amp.GradScaler` (with FSDP1, "
            "`ShardedGradScaler`), which finds an inf in any rank's shard, and leave out `autocast`. If you see "
            "*Attempting to unscale FP16 gradients*, the trained parameters are in fp16, so load them in fp32."
        ),
        numbers=("the loss is NaN or inf after a few steps with fp16, GradScaler or autocast",),
        behavior=(
            "NaN loss with mixed precision, amp or fp16; the loss becomes NaN after some epochs or steps",
            "the loss explodes or spikes with fp16; grad_norm is NaN or inf",
            "loss is 0.0 and grad_norm is NaN",
            "a non-finite gradient norm; error_if_nonfinite",
            "NaN after switching to fp16 or amp; overflow; the scale drops to zero; found_inf",
            "loss scale keeps decreasing; all steps are skipped; gradient overflow",
            "the grad norm is NaN or inf with ShardedGradScaler, GradScaler or FSDP",
            "the model works in bf16 or fp32, but gives NaN in fp16",
        ),
        quotes={
            "a run on the CPU": (
                "Attempting to unscale FP16 gradients.",
                "unscale_() has already been called on this optimizer since the last update",
                "unscale_() is being called after step()",
                "step() has already been called since the last update()",
                "is non-finite, so it cannot be clipped",
            ),
            "DeepSpeed, fairseq": (
                "Current loss scale already at minimum - cannot decrease scale",
                "Minimum loss scale reached",
            ),
            "apex, DeepSpeed": (
                "Gradient overflow. Skipping step, loss scaler",
                "OVERFLOW! Rank 0 Skipping step",
            ),
        },
        broken=compute_in_fp16,
        fixed=compute_in_bf16,
        right=norm_in_fp32,
        tolerance=0.02,  # bf16 rounds to three digits
    ),
    Failure(
        name="crash-uniform-dtype",
        title="FSDP expects uniform original parameter dtype",
        why=(
            "A unit's trained parameters are all-gathered and reduced in one buffer, so they all need the same dtype. "
            "Adapters in fp32 on a trained base in bf16 break that rule. FSDP1's message is *Must flatten tensors with "
            "uniform dtype*, and FSDP1 checks frozen parameters, too."
        ),
        tell="`{p.dtype for p in model.parameters() if p.requires_grad}` has two elements.",
        fix=(
            "Call `model.float()` before `fully_shard`, and pass "
            "`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` to compute in bf16. Or "
            "make the adapters separate units. With QLoRA, set `bnb_4bit_quant_storage=torch.bfloat16`."
        ),
        messages=("FSDP expects uniform original parameter dtype but got",),
        behavior=(
            "fp32 LoRA or QLoRA adapters on a bf16 base model can't be sharded",
            "QLoRA, 4-bit or 8-bit weights (bitsandbytes) under FSDP: parameters of several dtypes",
            "bnb_4bit_quant_storage must have the dtype of the other weights for FSDP",
            "norms, embeddings, the router or quantization scales are in float32 while the rest is in bfloat16",
            "mixed dtypes in one FSDP unit; cast the model to one dtype before wrapping",
        ),
        quotes={
            "a run on the CPU": (
                "Must flatten tensors with uniform dtype but got",
                "Only Tensors of floating point and complex dtype can require gradients",
            ),
            "torch/distributed/fsdp/_flat_param.py": (
                "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
                "Cannot flatten integer dtype tensors",
            ),
            "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": ("FSDP expects uniform reduce dtype but got",),
            "an older PyTorch": (
                "Integer parameters are unsupported",
                "Must flatten tensors with uniform dtype but got torch.float16 and torch.float32",
                "`FlatParameter` requires uniform dtype",
            ),
        },
        broken=shard_two_formats,
        fixed=shard_one_format,
        right=two_outputs_per_image,
        says="uniform original parameter dtype",
    ),
    Failure(
        name="memory-frozen-in-fp32",
        title="FSDP2 with adapters takes more memory than FSDP1",
        why=(
            "The full model was cast to fp32, including the frozen base, so even weights that never change are stored "
            "in fp32. With FSDP1, accelerate casts only the trainable parameters."
        ),
        tell="`{p.dtype for p in model.parameters() if not p.requires_grad}` contains `float32`.",
        fix=(
            "After loading, run `for p in model.parameters(): p.data = p.data.to(torch.float32 if p.requires_grad else "
            "torch.bfloat16)`, and put the adapters in separate units."
        ),
        behavior=(
            "with LoRA, FSDP2 takes more GPU memory than FSDP",
            "LoRA under FSDP2 needs more memory than under FSDP1",
            "the frozen base model is upcast to float32",
            "the checkpoint is twice as large as the model: weights were upcast and are saved in float32",
        ),
        quotes={
            "accelerate": (
                "Upcasted low precision parameters in",
                "FSDP upcast of low precision parameters to fp32",
            ),
        },
        broken=cast_all_parameters,
        fixed=cast_trained_parameters,
        right=half_of_the_model,
    ),
)
