"""Probes of FSDP2's units: how a model is split, how often units are called, and what's left in them after a step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_helpers.inspecting.parameters import of
from fsdp_helpers.inspecting.watch import Watch


def units(module: nn.Module) -> Iterator[tuple[str, nn.Module, FSDPParamGroup]]:
    """Yield a module's units that have parameters: their names, the units, and what FSDP2 keeps of each."""
    for name, one in module.named_modules():
        group = one._get_fsdp_state()._fsdp_param_group if isinstance(one, FSDPModule) else None
        if group is not None:
            yield name or "(root)", one, group


def one_unit(watch: Watch, module: nn.Module, inputs: tuple) -> None:
    """Compare the largest layer with the model, if all of it is one unit when it's called.

    Silent if no layer is less than half of the model: then units could hardly lower the peak.
    """
    is_part = any(one is module for root in watch.models if root is not module for one in root.modules())
    if [one for _, one, _ in units(module)] == [module] and not is_part:
        sizes = [sum(p.nbytes for p in one.parameters(recurse=False)) for one in module.modules()]
        if max(sizes) * 2 < sum(sizes):
            text = f"the whole model, {sum(sizes)} bytes, is one unit; its largest layer has {max(sizes)}"
            watch.note("finding", "memory-root-only", text)


def begin_pass(watch: Watch, module: nn.Module, inputs: tuple) -> None:
    """Keep the units of the outermost module that are all-gathered at each call, for `calls_of_units`."""
    watch.kept["calls"] = {id(one): [name, 0] for name, one, group in units(module) if group._reshard_after_forward}


def calls_of_units(watch: Watch, module: nn.Module) -> None:
    """Count the calls of each unit in a forward pass.

    Silent about units that stay unsharded, as the root does, and about calls in backward, where layers are recomputed.
    """
    unit = watch.kept["calls"].get(id(module))
    if unit and not watch.in_backward:
        watch.record.seen.add("units")
        unit[1] += 1
        if unit[1] > 1:
            text = f"a forward pass calls the unit {unit[0]} again, which all-gathers it again"
            watch.note("finding", "slow-head-per-chunk", text)


def after_micro_batches(watch: Watch, optimizer: torch.optim.Optimizer) -> None:
    """Look, before a step, for units whose gradients haven't been reduced, or that are still unsharded.

    The next pass computes with the old values of an unsharded unit. Silent about units without parameters of that
    optimizer.
    """

    def waits(param: Any) -> bool:
        full = getattr(param, "_unsharded_param", None)
        return param.unsharded_accumulated_grad is not None or full is not None and full.grad is not None

    mine = {id(p) for p in of(optimizer)}
    for name, _, group in [unit for model in watch.models for unit in units(model)]:
        if mine.isdisjoint(id(p.sharded_param) for p in group.fsdp_params):
            continue
        if any(map(waits, group.fsdp_params)):
            text = f"the optimizer steps while gradients of the unit {name} wait to be reduced"
            watch.note("finding", "crash-accumulation-flag", text)
        elif group.is_unsharded:
            text = f"the unit {name} is unsharded while the optimizer steps, so the next pass has its old values"
            watch.note("finding", "crash-accumulation-flag", text)


def compiled_without_graph(watch: Watch) -> None:
    """Look for compiled modules at the end, if torch.compile has made no graph. Silent if it has made any."""
    modules = [one for model in watch.models for one in model.modules()]
    compiled = [one for one in modules if isinstance(one, OptimizedModule) or one._compiled_call_impl is not None]
    if compiled and watch.counts["forward"]:
        watch.record.seen.add("compiled modules")
        if not counters["stats"]["unique_graphs"]:
            text = f"{len(compiled)} modules were compiled, and torch.compile made no graph of them"
            watch.note("finding", "crash-compile-and-fsdp", text, line="torch.compile")
