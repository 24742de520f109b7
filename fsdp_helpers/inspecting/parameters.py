"""Probes of parameters and buffers: what the optimizer holds, what ranks start with, and in which dtype."""

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_helpers.inspecting.watch import Watch, digest, listed, local, place

LOW = (torch.bfloat16, torch.float16)


def of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_first(watch: Watch) -> None:
    """Note parameters that sharding replaces, and look for them in the optimizer before a step.

    Silent about optimizers that hold the model's current parameters.
    """
    optimizers: weakref.WeakSet = weakref.WeakSet()
    before: dict[int, dict[int, str]] = defaultdict(dict)  # optimizer -> its parameters in models sharded afterward

    def before_sharding(module: nn.Module, options: dict) -> None:
        names = {id(p): name for name, p in module.named_parameters()}
        for optimizer in optimizers:  # each keeps its parameters, so that their ids stay theirs
            before[id(optimizer)].update({id(p): names[id(p)] for p in of(optimizer) if id(p) in names})

    def before_step(optimizer: torch.optim.Optimizer) -> None:
        watch.saw("optimizer")
        current, mine = watch.parameters(), of(optimizer)
        lost = [before[id(optimizer)].get(id(p)) for p in mine]
        if all(lost) and not any(id(p) in current for p in mine):
            text = f"the optimizer's {len(mine)} parameters ({listed(lost)}) aren't the model's any more"
            watch.say("wrong-optimizer-first", f"{text}; it was built before the model was sharded")

    watch.after(torch.optim.Optimizer, "__init__", lambda _, optimizer, *args, **options: optimizers.add(optimizer))
    watch.on("wrap", before_sharding)
    watch.on("step", before_step)


def plain_gradients(watch: Watch) -> None:
    """Compare the gradients of parameters that aren't sharded, before a step.

    Compares only ranks on which the parameter itself is the same; silent with FSDP1, whose shards are plain tensors.
    """
    steps = [0]

    def before_step(optimizer: torch.optim.Optimizer) -> None:
        steps[0] += 1
        named, models = watch.parameters(), watch.models()
        if any(isinstance(module, FullyShardedDataParallel) for model in models for module in model.modules()):
            return
        mine = [(named.get(id(p), ("a parameter",))[0], p) for p in of(optimizer) if p.grad is not None]
        is_sharded = any(isinstance(p, DTensor) for _, p in mine)
        card = "wrong-forgotten-root" if is_sharded else "wrong-unwrapped-module"
        for name, p in mine:
            if not isinstance(p, DTensor):
                key, norm = (steps[0], name, digest([p])), p.grad.norm().item()
                why = f"{name} is in no unit" if is_sharded else f"nobody averages the gradient of {name}"
                watch.agree(card, key, digest([p.grad]), f"{why}; its norm is {norm:.4g}")

    watch.on("step", before_step)


def starting_values(watch: Watch) -> None:
    """Compare full parameters over the ranks before they're sharded.

    Silent about a parameter that's on the meta device, or that the script fills after sharding and before its first
    forward pass, and about DDP and `sync_module_states`, which send rank 0's values.
    """
    pending: list[list] = []  # name, owner, digest before and after sharding, norm, line

    def before_sharding(module: nn.Module, options: dict) -> None:
        if options.get("sync_module_states"):
            return
        for path, owner in module.named_modules():
            for name, p in owner.named_parameters(path, recurse=False):
                if not isinstance(p, DTensor) and not p.is_meta:
                    pending.append([name, owner, digest([p]), "", p.detach().float().norm().item(), place()])

    def after_sharding(wrapper: nn.Module) -> None:
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            pending.clear()
        for entry in pending:
            entry[3] = entry[3] or now(*entry[:2])

    def now(name: str, owner: nn.Module) -> str:
        p = owner._parameters.get(name.rpartition(".")[2])
        return "gone" if p is None else digest([p])

    def compare(*_: Any) -> None:
        for number, (name, owner, before, after, norm, line) in enumerate(pending):
            if after == now(name, owner):
                watch.saw("starting values")
                text = f"{name} had a norm of {norm:.5g} before it was sharded"
                watch.agree("wrong-different-seeds", (number, name), before, text, line)
        pending.clear()

    watch.on("wrap", before_sharding)
    watch.on("wrapped", after_sharding)
    watch.on("forward", compare)
    watch.on("end", compare)


def low_precision_weights(watch: Watch) -> None:
    """Count the bf16 or fp16 values that a step changes, in its hooks.

    Silent if it changes at least half of those whose gradient isn't zero.
    """
    before: list[tuple[Tensor, Tensor]] = []

    def before_step(optimizer: torch.optim.Optimizer) -> None:
        low = [p for p in of(optimizer) if p.dtype in LOW and p.grad is not None]
        before[:] = [(p, local(p).clone()) for p in low]

    def after_step(optimizer: torch.optim.Optimizer) -> None:
        counts = [(((local(p) != old) & (local(p.grad) != 0)).sum(), (local(p.grad) != 0).sum()) for p, old in before]
        changed, total = (int(sum(column)) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if changed < total / 2 and any(group["lr"] for group in optimizer.param_groups):
            dtype = str(before[0][0].dtype).removeprefix("torch.")
            watch.say("wrong-bf16-masters", f"a step changed {changed} of {total} {dtype} values that have a gradient")

    watch.on("step", before_step)
    watch.on("stepped", after_step)


def muon_on_shards(watch: Watch) -> None:
    """Look in Muon's parameters, before a step, for plain matrices that share memory with a shard.

    Silent about other optimizers, and about DTensors, which torch's Muon gathers.
    """

    def before_step(optimizer: torch.optim.Optimizer) -> None:
        if "muon" not in type(optimizer).__name__.lower():
            return
        named = watch.parameters().values()
        shards = {local(p).untyped_storage().data_ptr(): name for name, p in named if isinstance(p, DTensor)}
        for p in of(optimizer):
            if not isinstance(p, DTensor) and (name := shards.get(p.untyped_storage().data_ptr())):
                watch.say("wrong-muon-local-rows", f"Muon gets {tuple(p.shape)}, only this rank's rows of {name}")

    watch.on("step", before_step)


def unfilled_buffers(watch: Watch) -> None:
    """Compare each buffer right after `to_empty` with itself at the first forward pass, and look for NaN.

    Silent about buffers that have been replaced, written to or loaded since.
    """
    empty: list[tuple[str, nn.Module, Tensor, int, str, str]] = []

    def emptied(_: nn.Module, module: nn.Module, *args: Any, **options: Any) -> None:
        for path, owner in module.named_modules():
            for name, buffer in owner.named_buffers(path, recurse=False):
                empty.append((name, owner, buffer, buffer._version, digest([buffer]), place()))

    def compare(*_: Any) -> None:
        for name, owner, buffer, version, before, line in empty:
            is_same = owner._buffers.get(name.rpartition(".")[2]) is buffer
            if is_same and (buffer.isnan().any() or (buffer._version, digest([buffer])) == (version, before)):
                watch.say("wrong-meta-buffers", f"nothing has filled the buffer {name} since to_empty", line)
        empty.clear()

    watch.after(nn.Module, "to_empty", emptied)
    watch.on("forward", compare)
    watch.on("end", compare)


def frozen_upcast(watch: Watch) -> None:
    """Note parameters that a module's `to` makes bf16 or fp16, and look at their dtype when they're sharded.

    Silent about parameters that are trained, or that were fp32 from the beginning.
    """
    low: dict[int, torch.Size] = {}  # by id: a reference, even a weak one, would keep torch from swapping a parameter

    def cast(_: nn.Module, module: nn.Module, *args: Any, **options: Any) -> None:
        low.update({id(p): p.shape for p in module.parameters(recurse=False) if p.dtype in LOW})

    def before_sharding(module: nn.Module, options: dict) -> None:
        upcast = [(name, p) for name, p in module.named_parameters() if low.get(id(p)) == p.shape]
        upcast = [(name, p) for name, p in upcast if p.dtype == torch.float32 and not p.requires_grad]
        if upcast:
            names, num_bytes = listed(name for name, _ in upcast), sum(p.nbytes for _, p in upcast)
            text = f"{names} are frozen, and were cast back to float32: {num_bytes} bytes instead of {num_bytes // 2}"
            watch.say("memory-frozen-in-fp32", text)

    watch.after(nn.Module, "_apply", cast)
    watch.on("wrap", before_sharding)


def running_statistics(watch: Watch) -> None:
    """Compare BatchNorm's running statistics over the ranks whenever such a layer is called in eval mode.

    Silent without a wrapper for several ranks, and about evaluations that not all ranks run.
    """
    counts = [0]

    def before_call(module: nn.Module, args: tuple) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.training and module.track_running_stats:
            counts[0] += watch.several
            if watch.several and module.running_mean is not None:
                key, mean = counts[0], module.running_mean
                text = f"a {type(module).__name__} is evaluated with running means of norm {mean.norm().item():.4g}"
                watch.agree("wrong-batchnorm", key, digest([mean, module.running_var]), text)

    watch.on("call", before_call)


PROBES = [
    optimizer_first,
    plain_gradients,
    starting_values,
    low_precision_weights,
    muon_on_shards,
    unfilled_buffers,
    frozen_upcast,
    running_statistics,
]
