"""Code that changes a sharded model, or uses it in a way that FSDP's hooks and flat parameters don't allow."""

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
    """An output container whose class PyTorch doesn't know."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class WithOutput(nn.Module):
    """A model that returns its outputs in an `Output` object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, samples: Tensor) -> Output:
        return Output(self.layers(samples))


class WithDict(WithOutput):
    """A model that returns its outputs in a dictionary."""

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
    """Return a frozen model with one trainable layer."""
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


WRAPPED = (
    Failure(
        name="crash-training-state",
        title="FSDP1 expects the FORWARD_BACKWARD state, but the current state is IDLE",
        why=(
            "FSDP1 expects one forward pass and then one backward pass through each unit, and it puts its hooks on the "
            "tensors that it finds in a unit's outputs. It doesn't find tensors inside an instance of your own class. "
            "The order also breaks if the loss doesn't use a unit's output, if there are two forward passes before a "
            "backward pass, or if a forward pass runs under `inference_mode` or is retried after an error."
        ),
        tell=(
            "Remove the object around the outputs, the second forward pass, the frozen or unused branch, or "
            "`auto_find_batch_size`, and see whether the error goes away. The first error in the log may be an "
            "out-of-memory error that was caught."
        ),
        fix=(
            "Return tensors, or a tuple, a dictionary or a dataclass of tensors. Run one forward pass for each "
            "backward pass, and use all outputs in the loss. Use `torch.no_grad()` instead of `inference_mode`. Set "
            "`use_orig_params=True`, and don't wrap a module as a unit if it isn't always used."
        ),
        messages=(
            "expected to be in states [<TrainingState.FORWARD_BACKWARD: 2>] but current state is TrainingState.IDLE",
        ),
        behavior=(
            "multiple forward and then multiple backward calls; inference_mode before training",
            "two models, a GAN, or a second forward pass before backward fails under FSDP",
            "FSDP has no find_unused_parameters: training fails if a part of the model isn't used in a step",
            "an assertion fails in FSDP's _post_backward_hook or _pre_backward_hook",
            "FSDP training crashes in backward, but DDP training works fine",
            "GAN, reinforcement learning, a teacher or EMA model: several forward passes before a backward pass under FSDP1",
            "a forward pass in eval or no_grad between forward and backward; two backward calls",
            "accessing parameters or calling state_dict in the middle of a step fails",
        ),
        quotes={
            "a run on the CPU": (
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`",
                "Inference tensors cannot be saved for backward",
                "`no_sync()` on inner FSDP instances is not supported",
                "state has already been lazily initialized for",
                "requires running forward through the root module first",
            ),
            "torch/distributed/fsdp/_runtime_utils.py": (
                "Expects `BACKWARD_PRE` or `BACKWARD_POST` state but got",
                "The `grad_fn` is needed to access the `AccumulateGrad` and register the post-backward hook",
                "HandleTrainingState.IDLE",
            ),
            "torch/distributed/fsdp/_exec_order_utils.py": ("Forward order differs across ranks",),
            "torch/distributed/fsdp/_unshard_param_utils.py": (
                "Cannot manually unshard parameters during forward/backward",
                "Expects the handle training to be IDLE",
            ),
            "torch's TensorImpl.cpp": ("Cannot set version_counter for inference tensor",),
            "torch/distributed/fsdp/_flat_param.py": ("Expects storage to be allocated",),
            "fairscale#1134": ("assert self.has_full_params",),
        },
        broken=return_an_object,
        fixed=return_a_dictionary,
        right=norm_alone,
        says="current state is TrainingState.IDLE",
    ),
    Failure(
        name="crash-changed-after-wrapping",
        title="Cannot writeback when the parameter shape changes",
        why=(
            "The model was changed after it had been sharded: `resize_token_embeddings`, `.to(dtype)`, `deepcopy`, a "
            "new head, pruning, an EMA copy. By then, the modules' parameters are views or shards."
        ),
        tell="Search the code between wrapping and the first step for lines that change `model`.",
        fix=(
            "First build the model, resize it, add adapters and cast; then shard it; then create the optimizer. If you "
            "need a copy, build a second model and call `load_state_dict` on it."
        ),
        messages=(
            "Cannot writeback when the",
            "Cannot writeback",
        ),
        behavior=(
            "deepcopy of an FSDP model for EMA fails",
            "adding tokens or layers after FSDP fails",
            "resize_token_embeddings, add_tokens, .to(), .half(), .cuda(), deepcopy or load after FSDP",
            "the model was moved, cast or changed after prepare() or fully_shard",
        ),
        quotes={
            "a run on the CPU": (
                "FSDP does not support deepcopy. Please use state dict for serialization",
                "does not support deepcopy",
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol",
            ),
            "torch's engine.cpp": (("invalid gradient at index 1 - got [0] but expected shape compatible with"),),
            "torch/distributed/fsdp/_flat_param.py": (
                "FSDP does not support changing the parameters between forward and backward",
            ),
        },
        broken=replace_the_head_after_wrapping,
        fixed=replace_the_head_before,
        right=three_per_image,
        says="Cannot writeback when the parameter shape changes",
    ),
    Failure(
        name="crash-flat-groups",
        title="The optimizer got an empty parameter list",
        why=(
            "FSDP1 with `use_orig_params=False` replaces the parameters with one `_flat_param` per unit. Parameter "
            "groups chosen by name (no weight decay for norms) match nothing, and the original parameters are gone."
        ),
        tell=(
            "The names in `[n for n, _ in model.named_parameters()]` end in `_flat_param`. (With "
            "`use_orig_params=True`, they still contain `_fsdp_wrapped_module.`, so compare the end of a name.)"
        ),
        fix=(
            "Wrap with `FSDP(model, use_orig_params=True)` first, then make the groups from the wrapped model's "
            "`named_parameters()`. FSDP2 keeps the names."
        ),
        messages=("optimizer got an empty parameter list",),
        behavior=(
            "parameter groups with different learning rates or weight decay fail under FSDP",
            "parameter names change to _flat_param or contain _fsdp_wrapped_module",
            "weight decay or learning rate groups by name don't work under FSDP; no parameter matches",
        ),
        quotes={
            "a run on the CPU": ("_fsdp_wrapped_module._flat_param",),
            "torch/distributed/fsdp/_flat_param.py": (
                "with an empty parameter list",
                "`params` were not found in",
            ),
            "pytorch-lightning": ("The optimizer does not seem to reference any FSDP parameters",),
        },
        broken=choose_flat_parameters,
        fixed=choose_original_parameters,
        right=three_weights,
        says="optimizer got an empty parameter list",
    ),
    Failure(
        name="crash-accumulation-flag",
        title="Accumulation ends inside no_sync, or the flag is set too late",
        why=(
            "If the last micro-batch's backward pass runs inside `no_sync`, its gradients aren't reduced. With FSDP1, "
            "the full gradients then don't match the shards' shapes in `step`. With DDP, the ranks drift apart without "
            "an error. DDP also checks the flag in the *forward pass*, so leaving `no_sync` before `backward` is too "
            "late."
        ),
        tell=(
            "With DDP and different images on each rank, `p.grad` differs across ranks after the last backward pass. "
            "With FSDP1, `p.grad` has the full size instead of the shard's."
        ),
        fix=(
            "Write `with model.no_sync() if not is_last else nullcontext(): loss = model(batch); loss.backward()`, "
            "with forward *and* backward inside. With FSDP2, call `model.set_requires_gradient_sync(is_last)` before "
            "the forward pass."
        ),
        messages=("must match the size of tensor b",),
        behavior=(
            "changing the batch size and grad accum steps should not affect the loss, but it is clearly worse",
            "the loss is worse with gradient accumulation than with a large batch, under DDP",
            (
                "no_sync with FSDP or DDP; the last micro-batch is not synchronized; ranks drift apart with gradient "
                "accumulation"
            ),
        ),
        quotes={
            "a run on the CPU": ("attempting to assign a gradient of size",),
            "torch's ForeachUtils.h": (
                "Tensors of the same index must be on the same device and the same dtype except `step` tensors",
            ),
            "torch/distributed/fsdp/_flat_param.py": ("Expects `.grad` to be the unsharded gradient in `no_sync()`",),
            "torch/distributed/fsdp/_runtime_utils.py": ("Shape mismatch when accumulating gradients",),
            "build-nanogpt PR #30": ("require_backward_grad_sync",),
            "an older PyTorch": ("assigned grad has data of a different size",),
        },
        broken=accumulate_without_an_end,
        fixed=reduce_the_last,
        right=norm_alone,
        says="must match the size of tensor b",
    ),
    Failure(
        name="crash-view-in-place",
        title="A view is being modified in place under FSDP or a backward hook",
        why=(
            "FSDP's hooks turn a unit's inputs (FSDP2), or its parameters (FSDP1), into views. An `inplace=True` "
            "activation at the start of a unit, or `+=` on a parameter or on part of an output, then writes into a "
            "view."
        ),
        tell="The operation in the traceback ends in an underscore, or is `+=`, `*=` or `nn.ReLU(inplace=True)`.",
        fix=(
            "Use `nn.ReLU(inplace=False)` and `x = x + y`, or put the activation in the same unit as the layer before "
            "it."
        ),
        messages=("is a view and is being modified inplace",),
        behavior=("an in-place operation on the output of a wrapped module fails; inplace=True, +=",),
        quotes={
            "a run on the CPU": (
                "a leaf Variable that requires grad is being used in an in-place operation",
                "a view of a leaf Variable that requires grad is being used in an in-place operation",
                "Inplace update to inference tensor outside InferenceMode is not allowed",
                "returned a view tensor. An in-place op on this view",
            ),
        },
        broken=change_the_input_in_place,
        fixed=leave_the_input_alone,
        right=two_layers,
        says="is a view and is being modified inplace",
    ),
    Failure(
        name="crash-nothing-trainable",
        title="No parameter requires a gradient",
        why=(
            "Either everything is frozen, or the only trainable parameters are inside a reentrant checkpoint whose "
            "inputs don't require gradients, as happens with adapters in the layers."
        ),
        tell=(
            "`sum(p.requires_grad for p in model.parameters())` is 0, or the warning *None of the inputs have "
            "requires_grad=True* precedes the error."
        ),
        fix=(
            "With transformers, call `model.enable_input_require_grads()` and pass "
            "`gradient_checkpointing_kwargs={'use_reentrant': False}`; in plain PyTorch, use `checkpoint(..., "
            "use_reentrant=False)`. Don't wrap a frozen model in DDP."
        ),
        messages=(
            "element 0 of tensors does not require grad and does not have a grad_fn",
            "does not require grad and does not have a grad_fn",
        ),
        behavior=(
            "LoRA with gradient checkpointing fails in backward",
            "DDP refuses a frozen model",
            "LoRA and gradient checkpointing: no gradient reaches the adapters; the loss doesn't require grad",
            "the whole model is frozen by mistake; requires_grad is False everywhere",
            "only the first or last layer gets gradients",
        ),
        quotes={
            "a run on the CPU": (
                "None of the inputs have requires_grad=True. Gradients will be None",
                "DistributedDataParallel is not needed when a module",
            ),
        },
        broken=checkpoint_reentrantly,
        fixed=checkpoint_without_reentry,
        right=adapted_alone,
        says="does not require grad and does not have a grad_fn",
    ),
    Failure(
        name="crash-compile-and-fsdp",
        title="torch.compile fails around or inside FSDP",
        why=(
            "The compiler can't trace FSDP's hooks, which unshard and reshard parameters. At a hook, it breaks the "
            "graph (an error with `fullgraph=True`), or it fails because a tensor's `.data` has changed. With FSDP1's "
            "flat parameters, every parameter's `.data` changes."
        ),
        tell="The same run works without `torch.compile`. `TORCH_LOGS=graph_breaks` prints where the graph breaks.",
        fix=(
            "Compile each block, then shard it: `for b in model.layers: b.compile()`, then `fully_shard(b)`. With "
            "FSDP1, set `use_orig_params=True`. If several ranks compile at the same time, raise the timeout for the "
            "first step."
        ),
        messages=("torch._dynamo.exc.Unsupported",),
        behavior=(
            "torch.compile with FSDP fails, recompiles in every step, or has graph breaks",
            "the first step with torch.compile times out on several ranks",
            "torch.compile with DDP or FSDP: recompilation, graph breaks, a hang or a timeout in the first steps",
            "Triton or Inductor cache races between ranks or nodes",
        ),
        quotes={
            "a run on the CPU": (
                "torch._dynamo.exc.TorchRuntimeError",
                "torch._dynamo hit config.recompile_limit",
                "Graph break in user code",
                "BackendCompilerFailed",
                "recompile_limit",
            ),
            "torch/_dynamo/exc.py": (
                "torch._dynamo.exc.InternalTorchDynamoError",
                "backend='inductor' raised",
            ),
            "torch/_inductor/exc.py": (
                "torch._inductor",
                "InductorError",
            ),
            "an older PyTorch": ("hit config.cache_size_limit",),
        },
        broken=compile_all,
        fixed=compile_each_layer,
        right=norm_alone,
        says="torch._dynamo.exc.Unsupported",
        stall_s=30.0,  # loading the compiler takes a while
    ),
)
