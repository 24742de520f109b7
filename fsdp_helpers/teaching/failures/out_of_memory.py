"""Out-of-memory failures: sharding is on, but it saves less memory than it should."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, images, in_units, small_model

CPU = torch.device("cpu")
FP32_BYTES = 4
LAYER_BYTES = FP32_BYTES * (WIDTH * WIDTH + WIDTH)  # weight and bias of the largest layer
WHOLE_BYTES = 2 * LAYER_BYTES + FP32_BYTES * (2 * WIDTH + 2)


def largest_gather(model: nn.Module) -> Numbers:
    """Return the number of bytes in a step's largest all-gather, the most that a rank unshards at one time."""
    with trace_collectives() as events:
        model(images()).sum().backward()
    return {"largest gather, bytes": max(event.bytes for event in events if event.op == "all_gather")}


# ---------------------------------------------------------------- the root alone


def shard_the_root_alone(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model, mesh=cpu_mesh())
    return largest_gather(model)


def shard_each_layer(rank: int, world_size: int) -> Numbers:
    model = small_model()
    for layer in (module for module in model if isinstance(module, nn.Linear)):
        fully_shard(layer, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return largest_gather(model)


def one_layer() -> Numbers:
    return {"largest gather, bytes": LAYER_BYTES}


# ---------------------------------------------------------------- FSDP1's default threshold


def count_units(model: nn.Module) -> Numbers:
    return {"units": sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())}


def wrap_by_default_size(rank: int, world_size: int) -> Numbers:
    policy = size_based_auto_wrap_policy  # 100 million parameters
    return count_units(FullyShardedDataParallel(small_model(), auto_wrap_policy=policy, device_id=CPU))


def wrap_by_own_size(rank: int, world_size: int) -> Numbers:
    policy = partial(size_based_auto_wrap_policy, min_num_params=WIDTH * WIDTH)
    return count_units(FullyShardedDataParallel(small_model(), auto_wrap_policy=policy, device_id=CPU))


def two_layers_and_root() -> Numbers:
    return {"units": 3}


# ---------------------------------------------------------------- full gradients that wait to be reduced


def hold_back_reduction(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    model.set_requires_gradient_sync(False)  # until the last micro-batch
    micro_batches = images().split(2)[:3]
    with trace_memory() as trace:
        for batch in micro_batches:
            model(batch).sum().backward()
    return {"bytes that wait": trace.whole().curve.held_bytes}


def reduce_each_micro_batch(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    micro_batches = images().split(2)[:3]
    with trace_memory() as trace:
        for batch in micro_batches:
            model(batch).sum().backward()
    return {"bytes that wait": trace.whole().curve.held_bytes}


def half_of_the_gradients() -> Numbers:
    return {"bytes that wait": WHOLE_BYTES / 2}


# ---------------------------------------------------------------- a full state dict on every rank


def local_bytes(state: dict) -> int:
    parts = [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
    return sum(part.nbytes for part in parts)


def full_state_everywhere(rank: int, world_size: int) -> Numbers:
    state = get_model_state_dict(in_units(small_model()), options=StateDictOptions(full_state_dict=True))
    return {"bytes of the state dict, per rank": local_bytes(state)}


def sharded_state(rank: int, world_size: int) -> Numbers:
    state = get_model_state_dict(in_units(small_model()))
    return {"bytes of the state dict, per rank": local_bytes(state)}


def half_of_the_state() -> Numbers:
    return {"bytes of the state dict, per rank": WHOLE_BYTES / 2}


# ---------------------------------------------------------------- activations that wait for backward


class Deep(nn.Module):
    """Four blocks whose activations are either kept until backward or recomputed in backward."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        self.blocks, self.recomputed = nn.ModuleList(blocks), recomputed

    def forward(self, samples: Tensor) -> Tensor:
        for block in self.blocks:
            recomputed = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
            samples = checkpoint(block, samples, **recomputed) if self.recomputed else block(samples)
        return samples


def bytes_before_backward(model: nn.Module) -> Numbers:
    batch = images(64)
    with trace_memory() as trace:
        loss = model(batch).mean()
    loss.backward()
    return {"bytes that wait for backward": trace.whole().curve.held_bytes}


def keep_activations(rank: int, world_size: int) -> Numbers:
    return bytes_before_backward(in_units(Deep(recomputed=False)))


def recompute_activations(rank: int, world_size: int) -> Numbers:
    return bytes_before_backward(in_units(Deep(recomputed=True)))


def inputs_of_blocks() -> Numbers:
    """Return the number of bytes in three blocks' inputs and the loss; the first block's input is the batch."""
    return {"bytes that wait for backward": 3 * images(64).nbytes + FP32_BYTES}


MEMORY = (
    Failure(
        name="memory-root-only",
        title="fully_shard doesn't lower peak memory",
        why=(
            "`fully_shard(model)` on its own makes the entire model one unit. That unit is all-gathered before the "
            "first layer runs, so every rank holds all parameters during forward and backward."
        ),
        tell=(
            "There's only one all-gather per forward pass. Count the all-gathers with `CommDebugMode`, or with this "
            "package's `trace_collectives`."
        ),
        fix=(
            "Shard each block first (`for block in model.blocks: fully_shard(block)`), and then the root "
            "(`fully_shard(model)`)."
        ),
        numbers=(
            "one all-gather per forward pass; peak memory includes the full model",
            "memory per GPU doesn't change with the number of GPUs",
        ),
        behavior=(
            "fully_shard saves no memory",
            "FSDP uses as much memory as DDP; no memory reduction with more GPUs; out of memory although sharded",
            "FSDP takes more memory than expected, or has the same memory usage as without it",
            "full_shard does not work: each GPU holds the total model weights",
            "no memory savings with FSDP; each GPU uses as much as with DDP; memory doesn't shrink with more GPUs",
            "the whole model is gathered at once; the transformer blocks aren't wrapped",
            "reshard_after_forward=False, SHARD_GRAD_OP or ZeRO-2 keeps all parameters",
            "why does FSDP use the same memory on 2, 4 and 8 GPUs",
        ),
        quotes={
            "torch's CUDACachingAllocator.cpp": ("CUDA out of memory. Tried to allocate",),
        },
        broken=shard_the_root_alone,
        fixed=shard_each_layer,
        right=one_layer,
    ),
    Failure(
        name="memory-default-threshold",
        title="auto_wrap_policy is set, but there's only one unit",
        why=(
            "By default, FSDP1's `size_based_auto_wrap_policy` turns a module into a unit if it has at least 100 "
            "million parameters. In a smaller model, the policy makes no units inside the root, and you get no warning."
        ),
        tell="Print the model, or count the `FullyShardedDataParallel` modules in it: there's only one.",
        fix=(
            "Pass a `min_num_params` that suits your model or, better, name the class of your blocks with "
            "`ModuleWrapPolicy`."
        ),
        numbers=("one FullyShardedDataParallel in the printed model",),
        behavior=(
            "auto_wrap_policy or size_based_auto_wrap_policy saves no memory",
            "FSDP doesn't reduce memory with the default auto-wrap policy",
            "min_num_params, size_based_auto_wrap_policy: only one unit, nothing is wrapped",
        ),
        broken=wrap_by_default_size,
        fixed=wrap_by_own_size,
        right=two_layers_and_root,
    ),
    Failure(
        name="memory-accumulation",
        title="Accumulating gradients takes more memory than a large batch",
        why=(
            "`no_sync` (FSDP1) and `set_requires_gradient_sync(False)` (FSDP2) save communication, but every rank then "
            "keeps full gradients instead of shards until the last micro-batch."
        ),
        tell="After the first micro-batch, memory has grown by 4 bytes per parameter of the full model.",
        fix=(
            "Let gradients be reduced after each micro-batch: leave out `model.set_requires_gradient_sync(False)`, "
            "unless full gradients fit in memory."
        ),
        numbers=("after the first micro-batch, memory is higher by 4 bytes per parameter of the full model",),
        behavior=(
            "out of memory with gradient accumulation, no_sync or set_requires_gradient_sync(False)",
            "memory grows with gradient_accumulation_steps under FSDP",
            "gradient accumulation needs more memory with FSDP than without",
        ),
        quotes={
            "torch's CUDACachingAllocator.cpp": ("CUDA out of memory. Tried to allocate",),
        },
        broken=hold_back_reduction,
        fixed=reduce_each_micro_batch,
        right=half_of_the_gradients,
    ),
    Failure(
        name="memory-full-state-dict",
        title="Training fits in memory, but saving doesn't",
        why=(
            "`full_state_dict=True` without `cpu_offload=True` gives every rank a full copy of the model and keeps it "
            "on the GPU."
        ),
        tell="All ranks run out of memory on the line that saves the model.",
        fix="Save shards with `torch.distributed.checkpoint`, and consolidate the files later, in one process.",
        behavior=(
            "out of memory when the model is saved: after the last epoch, for a checkpoint, or as a full state dict",
            "out of memory after training has finished, in save_model",
            (
                "out of memory when trying to save, or while saving the model, though memory is sufficient during "
                "training"
            ),
            "OOM issues with accelerator.save_state() or trainer.save_model()",
            "OOM or a timeout while saving an FSDP model, FULL_STATE_DICT, save_state or save_model",
            "host memory (CPU RAM) runs out on rank 0 when the checkpoint is gathered",
            "OOM when saving, or after finishing training, when the trained model is written",
            (
                "saving takes very long, or training stalls at each checkpoint; the full state dict is gathered to "
                "one rank"
            ),
            "OOM, killed or exit code -9 at the end of training, during the save",
            "CPU memory grows at each checkpoint; state_dict with offload_to_cpu on every rank",
            "GPU memory jumps or stays higher after saving a checkpoint",
            "OOM in save_pretrained or save_model after LoRA or full training that went well; save only the adapters",
        ),
        quotes={
            "torch/distributed/fsdp/_state_dict_utils.py": ("Failed to clone() tensor with name",),
            "torch's CUDACachingAllocator.cpp": ("CUDA out of memory. Tried to allocate",),
            "an older PyTorch": ("1EB memory",),
        },
        broken=full_state_everywhere,
        fixed=sharded_state,
        right=half_of_the_state,
    ),
    Failure(
        name="memory-activations",
        title="Out of memory in the first steps, even though everything is sharded",
        why=(
            "Sharding divides the parameters, the gradients and the optimizer state, but nothing else. Activations "
            "grow with the batch size and the sequence length, and logits grow with the vocabulary. Each unit is "
            "all-gathered in full on every rank, and Adam's state isn't allocated until the first step."
        ),
        tell=(
            "Halve the per-rank batch size, and see whether the step fits. Print `torch.cuda.max_memory_allocated()` "
            "after forward, after backward and after the optimizer step, to see where the peak occurs."
        ),
        fix=(
            "Use activation checkpointing for each block, a smaller micro-batch with accumulation, a loss computed in "
            "chunks, or `CPUOffloadPolicy`. `python -m fsdp_helpers plan` adds up the memory beforehand."
        ),
        behavior=(
            "OOM at the first forward, backward or optimizer step on several GPUs; more GPUs don't help",
            "out of memory with long sequences or a large batch under FSDP or DDP",
            "a model that fits on a single GPU runs out of memory with DDP",
            "CUDA out of memory in the very first iteration, in forward or in backward",
            "still runs out of memory with a batch size of 1; OOM on 8 GPUs when fine-tuning a 7B model",
            "CUDA OOM during training with FSDP; out of memory much earlier than without FSDP",
            "OOM error in the middle of training",
            "OOM in the first iteration, in the loss, in the logits, in attention or in optimizer.step",
            "the batch size, sequence length or resolution is too large for one GPU, even with FSDP",
            "out of memory with DDP on several GPUs, but not on one; batch per GPU",
            "how much memory do I need for a 7B, 13B or 70B model",
        ),
        quotes={
            "torch's CUDACachingAllocator.cpp": (
                "CUDA out of memory. Tried to allocate",
                "total capacity",
                "CUDA out of memory",
            ),
            "torch's Exceptions": (
                "torch.OutOfMemoryError",
                "OutOfMemoryError",
            ),
            "torch's CUDABlas.cpp": ("CUBLAS_STATUS_ALLOC_FAILED",),
            "an older PyTorch": (
                "torch.cuda.OutOfMemoryError",
                "HIP out of memory",
            ),
            "cuDNN": ("CUDNN_STATUS_ALLOC_FAILED",),
            "CUDA": ("CUDA error: out of memory",),
        },
        broken=keep_activations,
        fixed=recompute_activations,
        right=inputs_of_blocks,
    ),
)
