"""Probes of parameters and buffers: what the optimizer holds, and whether ranks have the same values."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_helpers.inspecting.watch import Watch, digest, local, place

LOW = torch.bfloat16, torch.float16


def of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_first(watch: Watch, optimizer: torch.optim.Optimizer) -> None:
    """Look for the optimizer's parameters among those of the models, before a step.

    Silent if any is in a model or has a gradient, and in a script that wraps no model.
    """
    current, mine = watch.parameters(), of(optimizer)
    if watch.is_wrapped and not any(id(p) in current or p.grad is not None for p in mine):
        text = f"the optimizer has {len(mine)} parameters; none has a gradient, and none is in a model any more"
        watch.note("finding", "wrong-optimizer-first", text)


def plain_parameters(watch: Watch, optimizer: torch.optim.Optimizer) -> None:
    """Compare each unsharded parameter's first gradient over the ranks, and its value a step later, before steps.

    Silent about those that start with different values, as stages of a pipeline do, and with FSDP1, whose shards are
    plain tensors, too.
    """
    if any(isinstance(one, FullyShardedDataParallel) for model in watch.models for one in model.modules()):
        return
    names, mine = watch.parameters(), [p for p in of(optimizer) if p.grad is not None]
    is_sharded = any(isinstance(p, DTensor) for p in mine)
    card = "wrong-forgotten-root" if is_sharded else "wrong-unwrapped-module"
    for p in mine:
        name, first = names.get(id(p), "a parameter"), watch.kept.get((id(optimizer), id(p)))
        if not isinstance(p, DTensor) and first is None:
            watch.kept[id(optimizer), id(p)] = digest([p])  # of this one: ZeRO's optimizer has another one inside it
            why = f"{name} is in no unit" if is_sharded else f"nobody averages the gradient of {name}"
            text = f"{why}; its norm is {p.grad.norm().item():.4g}"
            watch.note("same", card, text, digest([p.grad]), key=("gradient", name, digest([p])))
        elif not isinstance(p, DTensor):
            text = f"{name} was the same on all ranks; now it's not, and its norm is {p.norm().item():.6g}"
            watch.note("same", card, text, digest([p]), key=("value", name, first))


def before_sharding(watch: Watch, modules: list[nn.Module]) -> None:
    """Keep a digest of the full parameters of a unit of FSDP2, for `starting_values`. Silent about the meta device."""
    for module in modules:
        full = [p for p in module.parameters() if not isinstance(p, DTensor) and not p.is_meta]
        norm = nn.utils.get_total_norm([p.float() for p in full]).item()
        text = f"a {type(module).__name__} is sharded whose parameters have a norm of {norm:.6g}"
        watch.kept.setdefault("units", []).append([module, digest(full), text, place(), ""])


def after_sharding(watch: Watch) -> None:
    """Keep a digest of the shards, too."""
    for unit in watch.kept["units"]:
        unit[-1] = unit[-1] or digest(unit[0].parameters())


def starting_values(watch: Watch, *_: object) -> None:
    """Compare the full parameters that FSDP2 has sharded over the ranks, before the first forward pass, or at the end.

    Silent if the script has filled them since, and about meshes of some of the ranks.
    """
    for module, full, text, line, shards in watch.kept.pop("units", []):
        watch.record.seen.add("starting values")
        if watch.several and shards == digest(module.parameters()):
            watch.note("same", "wrong-different-seeds", text, full, line=line)


def low_precision_weights(watch: Watch, optimizer: torch.optim.Optimizer) -> None:
    """Count the bf16 or fp16 values that a step of Adam or AdamW has changed, from the second step on.

    Silent if it's at least half of those whose gradient isn't zero, and about other optimizers, which may collect
    what's rounded away.
    """
    changed, total = 0, 0
    for p in of(optimizer):
        if p.dtype in LOW and p.grad is not None and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            old = watch.kept.get(("low", id(p)))
            watch.kept["low", id(p)] = local(p).clone()
            if old is not None:
                has_gradient = local(p.grad) != 0
                changed += int(((local(p) != old) & has_gradient).sum())
                total += int(has_gradient.sum())
    if changed < total / 2 and any(group["lr"] for group in optimizer.param_groups):
        text = f"a step changed {changed} of {total} values in bf16 or fp16 that have a gradient"
        watch.note("finding", "wrong-bf16-masters", text)


def running_statistics(watch: Watch, module: nn.Module) -> None:
    """Compare BatchNorm's running statistics over the ranks whenever such a layer is called in eval mode.

    Silent without a wrapper for several ranks, and about evaluations that not all ranks run.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.training and module.running_mean is not None:
        watch.record.seen.add("BatchNorm in evaluation")
        norm, statistics = module.running_mean.norm().item(), digest([module.running_mean, module.running_var])
        if watch.several:
            text = f"a {type(module).__name__} is evaluated with running means of norm {norm:.4g}"
            watch.note("same", "wrong-batchnorm", text, statistics)
