"""Failures when loading weights and optimizer state into a sharded model, or when saving them."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import cpu_mesh, images, in_units, small_model

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# ---------------------------------------------------------------- every rank reads the full model


def pretrained_file(folder: str) -> Path:
    path = Path(folder, "model.pt")
    torch.save(small_model(seed=3).state_dict(), path)
    return path


def bytes_of_all_ranks(weights: dict[str, Tensor]) -> Numbers:
    held = torch.tensor(float(sum(tensor.nbytes for tensor in weights.values())))
    dist.all_reduce(held)
    return {"bytes read into host memory": held.item()}


def read_on_every_rank(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    with tempfile.TemporaryDirectory() as folder:
        weights = torch.load(pretrained_file(folder), weights_only=True)
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    return bytes_of_all_ranks(weights) | {"sum of outputs": model(images()).sum().item()}


def read_on_rank_0(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    with tempfile.TemporaryDirectory() as folder:
        weights = torch.load(pretrained_file(folder), weights_only=True) if rank == 0 else {}
        set_model_state_dict(model, dict(weights), options=FROM_RANK_0)
    return bytes_of_all_ranks(weights) | {"sum of outputs": model(images()).sum().item()}


def one_copy() -> Numbers:
    weights = small_model(seed=3).state_dict()
    held = float(sum(tensor.nbytes for tensor in weights.values()))
    return {"bytes read into host memory": held, "sum of outputs": small_model(seed=3)(images()).sum().item()}


# ---------------------------------------------------------------- names that don't match


def compiled_weights() -> dict[str, Tensor]:
    """Return a compiled model's weights under the names that the model's own `state_dict` uses."""
    return {f"_orig_mod.{name}": tensor for name, tensor in small_model(seed=3).state_dict().items()}


def load_what_fits(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, compiled_weights(), options=options)
    return {"sum of outputs": model(images()).sum().item()}


def load_under_the_right_names(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in compiled_weights().items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))  # strict
    return {"sum of outputs": model(images()).sum().item()}


def trained_outputs() -> Numbers:
    return {"sum of outputs": small_model(seed=3)(images()).sum().item()}


# ---------------------------------------------------------------- filled, and not handed over


def fill_a_copy(rank: int, world_size: int) -> Numbers:
    model, saved = in_units(small_model()), in_units(small_model(seed=3))
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True, full_state_dict=True))
    state.update(get_model_state_dict(saved, options=StateDictOptions(cpu_offload=True, full_state_dict=True)))
    return {"sum of outputs": model(images()).sum().item()}  # dcp.load filled `state`, but the model doesn't use it


def hand_the_copy_over(rank: int, world_size: int) -> Numbers:
    model, saved = in_units(small_model()), in_units(small_model(seed=3))
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True, full_state_dict=True))
    state.update(get_model_state_dict(saved, options=StateDictOptions(cpu_offload=True, full_state_dict=True)))
    set_model_state_dict(model, state, options=FROM_RANK_0)
    return {"sum of outputs": model(images()).sum().item()}


# ---------------------------------------------------------------- the meta device


def meta_model() -> nn.Module:
    with torch.device("meta"):
        model = small_model()
    return in_units(model)


def move_from_meta(rank: int, world_size: int) -> Numbers:
    model = meta_model().to("cpu")
    set_model_state_dict(model, small_model(seed=3).state_dict(), options=FROM_RANK_0)
    return {"sum of outputs": model(images()).sum().item()}


def allocate_then_load(rank: int, world_size: int) -> Numbers:
    model = meta_model().to_empty(device="cpu")
    set_model_state_dict(model, small_model(seed=3).state_dict(), options=FROM_RANK_0)
    return {"sum of outputs": model(images()).sum().item()}


# ---------------------------------------------------------------- a schedule on each rank

STEPS_DONE = 2


def saved_by_ddp() -> dict:
    """Return the full state of an optimizer whose schedule has reduced the learning rate to a third of 0.01."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = falling(optimizer)
    for _ in range(STEPS_DONE):
        model(images()).square().mean().backward()
        optimizer.step()
        schedule.step()
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def schedule_after_the_load(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    set_optimizer_state_dict(model, optimizer, saved_by_ddp() if rank == 0 else {}, options=FROM_RANK_0)
    schedule = falling(optimizer)
    for _ in range(STEPS_DONE):
        schedule.step()
    return {"learning rate": optimizer.param_groups[0]["lr"]}


def schedule_before_the_load(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = falling(optimizer)
    set_optimizer_state_dict(model, optimizer, saved_by_ddp() if rank == 0 else {}, options=FROM_RANK_0)
    for _ in range(STEPS_DONE):
        schedule.step()
    return {"learning rate": optimizer.param_groups[0]["lr"]}


def a_third() -> Numbers:
    return {"learning rate": 0.01 / (1 + STEPS_DONE)}


# ---------------------------------------------------------------- a parameter that is one number


class Scaled(nn.Module):
    """A model whose outputs are scaled by a learned factor."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.scale = small_model(), nn.Parameter(torch.full(shape, 2.0))

    def forward(self, samples: Tensor) -> Tensor:
        return self.scale * self.layer(samples)


def shard_a_number(rank: int, world_size: int) -> Numbers:
    model = fully_shard(Scaled(), mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def shard_a_row_of_one(rank: int, world_size: int) -> Numbers:
    model = fully_shard(Scaled(1), mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def scaled_alone() -> Numbers:
    return {"sum of outputs": Scaled()(images()).sum().item()}


# ---------------------------------------------------------------- one rank's shards in a file


def write_own_shards(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model(seed=3))
    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: shard.to_local() for name, shard in model.state_dict().items()}, Path(folder, "model.pt"))
        plain = small_model()
        plain.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
    return {"sum of outputs": plain(images()).sum().item()}


def write_full_tensors(rank: int, world_size: int) -> Numbers:
    model = in_units(small_model(seed=3))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    plain = small_model()
    if rank == 0:  # the others' dictionaries are empty
        plain.load_state_dict(state)
    for parameter in plain.parameters():
        dist.broadcast(parameter.detach(), 0)
    return {"sum of outputs": plain(images()).sum().item()}


LOADING = (
    Failure(
        name="save-one-ranks-shards",
        title="The saved file is too small and doesn't load: size mismatch",
        why=(
            "On each rank, a sharded model's tensors are that rank's shards, so a file written on rank 0 contains only "
            "rank 0's shard of each tensor. With FSDP1 and ZeRO-3, the tensors are even empty (`torch.Size([0])`) "
            "unless they've been unsharded."
        ),
        tell=(
            "The file is 1/N as large as the model, or only a few hundred kB. The message contains *copying a param "
            "with shape*, and the first dimension of that shape is a fraction of the right size, or 0."
        ),
        fix=(
            "Call `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` on "
            "every rank, then write the file on rank 0. Or save shards with `dcp.save` and consolidate them later."
        ),
        messages=(
            "size mismatch for",
            "copying a param with shape",
            "from checkpoint, the shape in current model is",
        ),
        numbers=("the saved file is 1/N of the size of the model, or a few hundred kB",),
        behavior=(
            "tensors in the saved file are empty (torch.Size([0])) or flat, or have only part of their rows",
            "the saved checkpoint is larger, or smaller, than the base model's",
            (
                "the saved model is incomplete, or has only part of the parameters; the adapter or model file is "
                "nearly empty"
            ),
            "resuming on a different number of GPUs fails with a size mismatch",
            "the state dict is empty, or contains only part of the weights, after FSDP training",
            (
                "the checkpoint is much smaller than expected; each rank saves its own part; only rank 0's shard is "
                "in the file"
            ),
            (
                "adapter_model.safetensors or pytorch_model.bin is only a few kB; LoRA weights are empty after FSDP "
                "or ZeRO-3"
            ),
            "saved weights have shape 0, are 1-D, or have only a fraction of the rows; loading reports a size mismatch",
            "a model saved under FSDP can't be loaded by from_pretrained",
        ),
        quotes={
            "a run on the CPU": (
                "torch.Size([0]) from checkpoint",
                "shape torch.Size([0])",
            ),
            "transformers": ("ignore_mismatched_sizes=True",),
        },
        broken=write_own_shards,
        fixed=write_full_tensors,
        right=trained_outputs,
        says="size mismatch for",
    ),
    Failure(
        name="memory-every-rank-loads",
        title="The host runs out of memory while the model is loaded",
        why=(
            "Each rank reads the full model before it keeps its shard, so eight ranks on one machine need host memory "
            "for eight models. Linux then kills one of the processes, which can no longer print a message."
        ),
        tell=(
            "torchrun reports exit code -9, and `dmesg` reports that a process ran out of memory. The kill comes "
            "before the first step."
        ),
        fix=(
            "Read the weights only on rank 0, build the model on the meta device on all other ranks, and call "
            "`set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, "
            "broadcast_from_rank0=True))`. Or load shards with `dcp.load`."
        ),
        numbers=("host memory is the number of ranks times the size of the model",),
        behavior=(
            "killed, without a message, while loading checkpoint shards or the model",
            "all processes load the full checkpoint; CPU memory usage grows to the number of GPUs times the model size",
            (
                "CPU RAM explodes or runs out while a large model is loaded on several GPUs; every process loads the "
                "whole model; SIGKILL"
            ),
            "all GPUs load the total model weights when initializing the model",
            "the process is killed, RAM OOM, while loading the model",
            "SIGKILL, -9 or out of host memory before the first step; loading LLaMA 65B or 70B on 8 GPUs",
            (
                "loading the model takes very long on each rank; every process reads the checkpoint from disk or the "
                "network"
            ),
            "the pod or container is OOMKilled or evicted while loading, exit code 137",
            "from_pretrained on all ranks; low_cpu_mem_usage; cpu_ram_efficient_loading",
            "CPU RAM usage is multiplied by the number of processes",
        ),
        quotes={
            "a run on the CPU": (
                "failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary",
                "Signal 9 (SIGKILL) received by PID",
                "failed (exitcode: -9)",
                "Signal 9 (SIGKILL)",
                "exitcode  : -9",
                "died with <Signals.SIGKILL: 9>",
                "exit code 137",
                "Exit Code: 137",
                "exit code -9",
            ),
            "torch's CUDACachingAllocator.cpp": ("CUDA out of memory. Tried to allocate",),
            "Kubernetes, Docker, the kernel": (
                "OOMKilled",
                "Out of memory: Killed process",
                "OutOfMemoryError: Task was killed",
                "oom-killer",
            ),
        },
        broken=read_on_every_rank,
        fixed=read_on_rank_0,
        right=one_copy,
    ),
    Failure(
        name="save-not-loaded",
        title="Loading succeeds, but the model is untrained",
        why=(
            "With `strict=False`, names that don't match are skipped. `torch.compile` puts `_orig_mod.` in front of "
            "every name, and DDP adds `module.`, so all names are skipped without an error."
        ),
        tell=(
            "Print what `load_state_dict` returns: every key in the model is missing, and every key in the file is "
            "unexpected. The first loss is as high as an untrained model's."
        ),
        fix=(
            "Keep `strict=True` (the default). Remove the prefix with `name.removeprefix('_orig_mod.')`, or save with "
            "`get_model_state_dict(model)`."
        ),
        numbers=(
            "the first loss is that of an untrained model",
            (
                "the loss does not decrease from ln(vocabulary), 10 to 12 in a language model: the pretrained weights "
                "were never loaded"
            ),
        ),
        behavior=(
            "load_state_dict(strict=False) succeeds without loading anything: names begin with module. or _orig_mod.",
            "a fine-tuned model produces garbage after it was loaded",
            (
                "a loaded checkpoint gives random accuracy or garbage; after resuming, the loss is that of an "
                "untrained model"
            ),
            "missing_keys and unexpected_keys are not empty",
            "the loaded model gives different results from the saved one; wrong weights after loading",
            "switched to FSDP2: the loss is not decreasing, and grad_norm = 0 for all training steps",
            (
                "after loading, accuracy is random, the output is garbage, or the loss starts from scratch: no key "
                "matched"
            ),
            "load_state_dict doesn't complain, but nothing changes; strict=False",
            "resuming starts from an untrained model; the checkpoint was ignored",
        ),
        quotes={
            "a run on the CPU": ("_IncompatibleKeys(missing_keys=",),
            "torch/distributed/fsdp/_state_dict_utils.py": ("Did not find param with FQN",),
            "transformers": (
                "were not initialized from the model checkpoint",
                "Some weights of the model checkpoint",
            ),
        },
        broken=load_what_fits,
        fixed=load_under_the_right_names,
        right=trained_outputs,
    ),
    Failure(
        name="save-not-set",
        title="dcp.load reads the checkpoint, but the model doesn't change",
        why=(
            "`dcp.load` fills the dictionary that you pass. A sharded state dict shares its memory with the model. But "
            "a full state dict, or a state dict on the CPU, is a copy, so loading into it doesn't change the model."
        ),
        tell="A parameter's norm is the same before and after loading.",
        fix=(
            "After `dcp.load(state, ...)`, call `set_model_state_dict(model, state, ...)`, and "
            "`set_optimizer_state_dict` for the optimizer."
        ),
        behavior=(
            "dcp.load succeeds, but the model is unchanged",
            (
                "dcp.load without set_state_dict: weights stay random or at their initial values; the loaded state "
                "dict is correct, but the model isn't"
            ),
        ),
        broken=fill_a_copy,
        fixed=hand_the_copy_over,
        right=trained_outputs,
    ),
    Failure(
        name="crash-meta-tensor",
        title="Cannot copy out of meta tensor; no data",
        why=(
            "A model built on the meta device has shapes but no values, so there's nothing to copy. If you use such a "
            "model as it is, it fails with *is not on the expected device meta* or, if it's sharded, with *should be "
            "materialized from meta device*."
        ),
        tell="`[name for name, p in model.named_parameters() if p.is_meta]` isn't empty.",
        fix=(
            "Call `model.to_empty(device=...)` after `fully_shard`, then load or initialize the parameters and the "
            "buffers."
        ),
        messages=("Cannot copy out of meta tensor; no data!",),
        behavior=(
            "a model that was built on the meta device can't be moved or used",
            "low_cpu_mem_usage, init_empty_weights or cpu_ram_efficient_loading ends in an error about meta tensors",
            "a parameter, buffer, rotary table or tied head is still on the meta device",
            "to_empty, materialize, init_empty_weights or reset_parameters is missing on some ranks",
            "missing keys in the checkpoint leave parameters on the meta device",
        ),
        quotes={
            "a run on the CPU": (
                "is not on the expected device meta",
                "FSDP parameters should be materialized from meta device before training",
                "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()",
                "Tensor on device cpu is not on the expected device meta",
                "Tensor.item() cannot be called on meta tensors",
                "Cannot copy out of meta tensor",
                "Unable to call `reset_parameters()` for module on meta device",
            ),
            "torch/_prims_common/__init__.py": ("Tensor on device meta is not on the expected device cuda:0",),
            "an older PyTorch": ("c10d::broadcast_: attempted to run this operator with Meta tensors",),
            "accelerate, transformers": (
                "is on the meta device, we need a `value` to put in on",
                "You can't move a model that has some modules offloaded to cpu or disk",
            ),
            "accelerate": ("some parameters are on the meta device",),
        },
        broken=move_from_meta,
        fixed=allocate_then_load,
        right=trained_outputs,
        says="Cannot copy out of meta tensor",
    ),
    Failure(
        name="wrong-schedule-per-rank",
        title="Each rank uses a different learning rate",
        why=(
            "A schedule starts from the optimizer's `initial_lr`. With `broadcast_from_rank0`, only rank 0 gets this "
            "value, and the other ranks use the current learning rate instead. No error is raised."
        ),
        tell="Log the learning rate of every rank, not only rank 0's.",
        fix=(
            "Create the optimizer, then the schedule, and load last: `schedule = LambdaLR(optimizer, ...)` comes "
            "before `set_optimizer_state_dict`."
        ),
        numbers=("each rank has a different learning rate after a resume or a move to FSDP",),
        behavior=("learning rates differ between ranks; ReduceLROnPlateau with a local metric",),
        broken=schedule_after_the_load,
        fixed=schedule_before_the_load,
        right=a_third,
    ),
    Failure(
        name="crash-scalar-parameter",
        title="fully_shard doesn't support scalar parameters",
        why=(
            "FSDP splits each parameter along its first dimension, but a scalar, such as a logit scale or a layer "
            "scale, has no dimensions. `fully_shard` also rejects a parameter that isn't contiguous."
        ),
        tell="`[name for name, p in model.named_parameters() if p.ndim == 0]` lists the scalars.",
        fix=(
            "Replace the scalar with a one-element vector, `nn.Parameter(torch.ones(1))`, and reshape it in old "
            "checkpoints with `tensor.reshape(1)`. If a parameter isn't contiguous, run `parameter.data = "
            "parameter.data.contiguous()`."
        ),
        messages=("fully_shard doesn't support scalar parameters",),
        behavior=(
            "a logit scale or a layer scale breaks a move to FSDP2",
            "a 0-dim parameter, a temperature or a logit_scale fails under FSDP",
            "a parameter isn't contiguous, or a dimension can't be divided among the ranks",
        ),
        quotes={
            "a run on the CPU": (
                "doesn't support scalar parameters",
                "to a 1D tensor with numel equal to 1",
                "FSDP does not support non-contiguous parameters yet",
                "FSDP does not support uneven sharding on dim",
            ),
        },
        broken=shard_a_number,
        fixed=shard_a_row_of_one,
        right=scaled_alone,
        says="support scalar parameters",
    ),
)
