"""Crashes with a message that makes sense once you know the cause."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, images, in_units, small_model

CPU = torch.device("cpu")

# ---------------------------------------------------------------- one rank skips a step


def skip_bad_loss(rank: int, world_size: int) -> Numbers:
    model, num_steps = in_units(small_model()), 0
    for step in range(3):
        broken_image = rank == 1 and step == 1
        loss = model(images() * (float("nan") if broken_image else 1.0)).sum()
        if not loss.isfinite():
            continue  # this rank alone
        loss.backward()
        num_steps += 1
    return {"steps": num_steps}


def skip_bad_loss_together(rank: int, world_size: int) -> Numbers:
    model, num_steps = in_units(small_model()), 0
    for step in range(3):
        broken_image = rank == 1 and step == 1
        loss = model(images() * (float("nan") if broken_image else 1.0)).sum()
        is_good = loss.detach().isfinite().float()
        dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
        if not is_good:
            continue  # all ranks
        loss.backward()
        num_steps += 1
    return {"steps": num_steps}


def two_steps() -> Numbers:
    return {"steps": 2}


# ---------------------------------------------------------------- a unit that is never called


class TwoBlocks(nn.Module):
    """A model that calls the blocks in its list one by one, but never calls the list itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([small_model(), nn.Linear(2, 2)])

    def forward(self, samples: Tensor) -> Tensor:
        for block in self.blocks:
            samples = block(samples)
        return samples


def shard_the_list(rank: int, world_size: int) -> Numbers:
    model = TwoBlocks()
    fully_shard(model.blocks, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def shard_the_blocks(rank: int, world_size: int) -> Numbers:
    model = TwoBlocks()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def blocks_alone() -> Numbers:
    return {"sum of outputs": TwoBlocks()(images()).sum().item()}


# ---------------------------------------------------------------- past the hooks


def call_part_of_a_unit(rank: int, world_size: int) -> Numbers:
    model = fully_shard(small_model(), mesh=cpu_mesh())
    return {"sum of features": model[0](images()).sum().item()}


def call_the_unit(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of features": model[0](images()).sum().item()}


def features_alone() -> Numbers:
    return {"sum of features": small_model()[0](images()).sum().item()}


# ---------------------------------------------------------------- tied weights


class TinyLanguageModel(nn.Module):
    """An embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


TOKENS = torch.arange(4)


def tied_in_two_units(rank: int, world_size: int) -> Numbers:
    model = TinyLanguageModel()
    fully_shard(model.embedding, mesh=cpu_mesh())
    fully_shard(model.head, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of logits": model(TOKENS).sum().item()}


def tied_in_one_unit(rank: int, world_size: int) -> Numbers:
    model = TinyLanguageModel()
    fully_shard([model.embedding, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of logits": model(TOKENS).sum().item()}


def tied_alone() -> Numbers:
    return {"sum of logits": TinyLanguageModel()(TOKENS).sum().item()}


# ---------------------------------------------------------------- frozen parameters, FSDP1


def freeze_in_a_flat_unit(rank: int, world_size: int) -> Numbers:
    model = small_model()
    model[0].requires_grad_(False)
    sharded = FullyShardedDataParallel(model, device_id=CPU)
    return {"sum of outputs": sharded(images()).sum().item()}


def freeze_with_original_parameters(rank: int, world_size: int) -> Numbers:
    model = small_model()
    model[0].requires_grad_(False)
    sharded = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    return {"sum of outputs": sharded(images()).sum().item()}


def outputs_alone() -> Numbers:
    return {"sum of outputs": small_model()(images()).sum().item()}


# ---------------------------------------------------------------- the encoder's fast path, FSDP1


def encoder_layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)


@torch.no_grad()
def units_inside_the_encoder_layer(rank: int, world_size: int) -> Numbers:
    linear_layers = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(encoder_layer(), auto_wrap_policy=linear_layers, device_id=CPU).eval()
    return {"sum of outputs": model(images()[None]).abs().sum().item()}


@torch.no_grad()
def the_encoder_layer_as_unit(rank: int, world_size: int) -> Numbers:
    whole_layers = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = FullyShardedDataParallel(encoder_layer(), auto_wrap_policy=whole_layers, device_id=CPU).eval()
    return {"sum of outputs": model(images()[None]).abs().sum().item()}


def encoder_alone() -> Numbers:
    with torch.no_grad():
        return {"sum of outputs": encoder_layer().eval()(images()[None]).abs().sum().item()}


CRASHES = (
    Failure(
        name="crash-skipped-step",
        title="One rank skips a batch, and a process is aborted",
        why=(
            "Rank 1 skips a step whose loss is NaN, so its next all-gather is matched with rank 0's gradient "
            "reduction. The gloo backend receives more bytes than it expects, and its C++ code aborts the process. "
            "NCCL would hang or mix up the data instead."
        ),
        tell=(
            "The aborted rank's last line on standard error is *Received data size doesn't match expected size*, which "
            "means that two ranks are in different collectives. `TORCH_DISTRIBUTED_DEBUG=DETAIL` tells you which "
            "collectives."
        ),
        fix="Make the decision together: all-reduce a flag, and skip the step on all ranks or on none.",
        messages=(
            "Received data size doesn't match expected size",
            "Signal 6 (SIGABRT) received by PID",
        ),
        behavior=(
            "one rank skips a batch, for example after a NaN loss, and a process aborts",
            (
                "some ranks skip backward, the optimizer's step or a batch (NaN loss, empty batch, out of memory) and "
                "continue"
            ),
            "a rank catches an exception and goes on with the next batch",
            "ranks are off by one collective; shapes of an all-reduce don't match between ranks",
        ),
        quotes={
            "a run on the CPU": (
                "Detected mismatch between collectives on ranks",
                "Collectives differ in the following aspects",
                "is running collective: CollectiveFingerPrint",
                "CollectiveFingerPrint",
                "Tensor Tensor shapes",
            ),
            "an older gloo": ("Invalid bytes received",),
            "NCCL": ("Message truncated : received",),
        },
        broken=skip_bad_loss,
        fixed=skip_bad_loss_together,
        right=two_steps,
        says="(?s)SIGABRT.*doesn't match expected size",
    ),
    Failure(
        name="crash-mixed-tensor-dtensor",
        title="got mixed torch.Tensor and DTensor",
        why=(
            "A unit's hooks unshard its parameters when you call the unit. If you call `model.forward` or a layer "
            "inside the unit directly, the hooks don't run, and the layer finds shards, which are DTensors."
        ),
        tell="In the traceback, the unit's `__call__` doesn't appear above the failing layer.",
        fix=(
            "Call the unit. If you need to call an inner module on its own, make that module a unit. For a "
            "method such as `generate`, use `register_fsdp_forward_method(model, 'generate')`."
        ),
        messages=("got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",),
        behavior=(
            "calling generate or a submodule, or parallelizing only part of the model, fails in the first layer",
            "calling generate on a wrapped model results in an error; it works with summon_full_params",
            "model.generate() under FSDP fails; a method of an FSDP model, or a layer inside it, is called directly",
            "a forward method, an encoder or an embedding of the FSDP model is called directly, not through the root",
            "a custom method such as encode, encode_image, sample or get_logits fails under FSDP; only forward works",
            "weights are flat, 1-D or empty inside forward; the layer sees a shard instead of the full weight",
            "merging LoRA, or tying or reading weights inside forward, fails under FSDP",
            (
                "a plain tensor, a mask, an index, a position or a cache meets DTensor parameters, under tensor "
                "parallelism or FSDP2"
            ),
        ),
        quotes={
            "a run on the CPU": (
                "'weight' must be 2-D",
                "weight should have at least three dimensions",
                "are out of bounds for storage of size 0",
                "setStorage: sizes",
                "mat2 must be a matrix, got 1-D tensor",
                "is invalid for input of size",
                "a Tensor with 0 elements",
                "weight should have at least",
                "running_mean should contain",
                "need to convert all torch.Tensor to DTensor before calling distributed operators",
                "got mixed torch.Tensor and DTensor",
                "size mismatch, got input",
                "self must be a matrix",
                "mat1 and mat2 shapes cannot be multiplied",
            ),
            "torch's TensorImpl.h": (
                "The tensor has a non-zero number of elements, but its data is not allocated yet",
                "The tensor has a non-zero number of elements",
            ),
            "torch's LinearAlgebra.cpp": ("2D tensors expected, but got",),
            "torch/nn/functional.py": ("which has 0 elements",),
            "torch's Convolution.cpp": ("expected weight to be at least",),
            "torch's serialization.cpp": ("storage has wrong byte size",),
            "an older PyTorch": (
                "tensor should have ND shape but has 1D shape",
                "aten.embedding.default: got mixed torch.Tensor and DTensor",
            ),
        },
        broken=call_part_of_a_unit,
        fixed=call_the_unit,
        right=features_alone,
        says="got mixed torch.Tensor and DTensor",
    ),
    Failure(
        name="crash-tied-weights",
        title="Parameter is shared with a parameter already managed by another FSDP group",
        why=(
            "A language model's head often uses the embedding's weight, and one tensor can't belong to two units. "
            "FSDP1 fails later, with a shape mismatch. FSDP2 in PyTorch 2.11 doesn't raise an error."
        ),
        tell="`model.head.weight is model.embedding.weight` is true before sharding.",
        fix="Put both modules into one unit, `fully_shard([model.embedding, model.head])`, or leave both in the root.",
        messages=("is shared with a parameter already managed by another FSDP group",),
        behavior=(
            "a language model with tied embeddings can't be sharded",
            "tie_word_embeddings, a shared embedding, lm_head and embed_tokens, or a shared layer in two units",
            "tied weights are no longer tied after FSDP; the head and the embedding train separately",
            "a parameter is reused by two modules",
        ),
        quotes={
            "a run on the CPU": ("size mismatch, got input",),
            "torch/distributed/fsdp/_fully_shard/_fsdp_state.py": (
                "For shared/tied parameters, use",
                "managed by another FSDP group",
            ),
            "accelerate": (
                "This is likely due to tied embeddings",
                "Parameters missing after FSDP2 wrapping",
            ),
        },
        broken=tied_in_two_units,
        fixed=tied_in_one_unit,
        right=tied_alone,
        says="shared",
        not_in="2.11",
    ),
    Failure(
        name="crash-container",
        title="fully_shard does not support containers that do not implement forward",
        why=(
            "A unit is unsharded when its `forward` is called. A `ModuleList` or `ModuleDict` doesn't have a "
            "`forward`, so the model calls the modules inside it directly."
        ),
        tell="The message names the container.",
        fix=(
            "Shard the modules in the list, not the list itself. Use `for block in model.layers: fully_shard(block)` "
            "instead of `fully_shard(model.layers)`."
        ),
        messages=("does not support containers that do not implement forward",),
        behavior=("fully_shard fails on a ModuleList, a ModuleDict or model.layers",),
        quotes={
            "a run on the CPU": ("FSDP will not all-gather parameters for containers that do not implement forward",),
        },
        broken=shard_the_list,
        fixed=shard_the_blocks,
        right=blocks_alone,
        says="containers that do not implement forward",
    ),
    Failure(
        name="crash-frozen-flat",
        title="Must flatten tensors with uniform requires_grad",
        why=(
            "FSDP1 flattens all of a unit's parameters into a single parameter, which either requires gradients or "
            "doesn't. So a frozen layer and a trained layer can't be in the same unit."
        ),
        tell=(
            "The error is raised while the model is being wrapped, before the first step. FSDP2 doesn't have this "
            "limitation."
        ),
        fix="Pass `use_orig_params=True`, give frozen layers their own units, or move to FSDP2.",
        messages=("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",),
        behavior=(
            "FSDP1 fails while wrapping a model with frozen layers or LoRA",
            "only some of the layers' weights are frozen",
            "PEFT, LoRA or a frozen encoder with FSDP: an error about requires_grad",
            "freezing some layers fails with FSDP",
            "a frozen backbone, vision tower or text encoder under FSDP1; requires_grad=False in part of a unit",
            "use_orig_params must be True for LoRA, freezing or several parameter groups",
        ),
        quotes={
            "an older PyTorch": ("`FlatParameter` requires uniform `requires_grad`",),
            "fairscale": (
                "expects all parameters in the same parameter group of the module to have same requires_grad",
            ),
        },
        broken=freeze_in_a_flat_unit,
        fixed=freeze_with_original_parameters,
        right=outputs_alone,
        says="uniform `requires_grad`",
    ),
    Failure(
        name="crash-encoder-fast-path",
        title="Training works, but evaluation fails inside nn.TransformerEncoderLayer",
        why=(
            "In evaluation, PyTorch's encoder layer takes a fast path that reads the inner layers' weights instead "
            "of calling those layers. If the inner layers are FSDP1 units, their weights are empty or flat at that "
            "point."
        ),
        tell=(
            "The error occurs only in `eval()` mode with `no_grad`. The traceback ends in the encoder layer, not in a "
            "linear layer."
        ),
        fix="Make the whole encoder layer one unit.",
        behavior=("training works, but evaluation fails inside nn.TransformerEncoderLayer",),
        broken=units_inside_the_encoder_layer,
        fixed=the_encoder_layer_as_unit,
        right=encoder_alone,
        says="setStorage|2d|shape|size",
        tolerance=1e-4,  # the fast path adds up in a different order
    ),
)
