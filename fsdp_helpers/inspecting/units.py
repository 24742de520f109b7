"""Probes of FSDP's units: how a model is split, which units are called, and what happens to their parameters."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_helpers.inspecting.parameters import LOW
from fsdp_helpers.inspecting.watch import Watch, listed, place

UNIT = (FSDPModule, FullyShardedDataParallel)


def has_own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def one_unit(watch: Watch) -> None:
    """Compare the largest layer with the model, if the model is called and all of it is one unit.

    Silent if no layer is less than half of it: then units could hardly lower the peak.
    """

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        units = [one for one in module.modules() if isinstance(one, UNIT)]
        sizes = [sum(p.nbytes for p in one.parameters(recurse=False)) for one in module.modules()]
        if units != [module] or not isinstance(module, FSDPModule) or max(sizes) * 2 >= sum(sizes):
            return
        text = f"the whole model, {sum(sizes)} bytes, is one unit; its largest layer has {max(sizes)}"
        watch.say("memory-root-only", text)

    watch.on("forward", before_forward)


def policy_without_units(watch: Watch) -> None:
    """Count the units that FSDP1 makes with a policy by size. Silent about other policies, and if there is more than one."""

    def before_wrapping(module: nn.Module, options: dict) -> None:
        policy = options.get("auto_wrap_policy")
        policies[0] = getattr(policy, "func", policy)

    def wrapped(wrapper: nn.Module) -> None:
        units = sum(isinstance(one, FullyShardedDataParallel) for one in wrapper.modules())
        if policies[0] is size_based_auto_wrap_policy and units == 1 and isinstance(wrapper, FullyShardedDataParallel):
            num = sum(p.numel() for p in wrapper.parameters())
            watch.say("memory-default-threshold", f"auto_wrap_policy made no unit inside the root of {num} values")

    policies: list[Any] = [None]
    watch.on("wrap", before_wrapping)
    watch.on("wrapped", wrapped)


def split_blocks(watch: Watch) -> None:
    """Look for blocks whose layers are units while they aren't, when the model is called.

    Silent unless there are at least two such blocks of one class, with at least two units in each.
    """

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        blocks = Counter()
        for one in module.modules():
            inside = [child for child in one.children() if isinstance(child, UNIT)]
            if one is not module and len(inside) > 1 and not isinstance(one, (*UNIT, nn.ModuleList, nn.ModuleDict)):
                blocks[type(one).__name__, len(inside)] += 1
        for (name, num), count in blocks.items():
            if count > 1:
                text = f"{count} blocks ({name}) have {num} units each, so a pass has {count * num} all-gathers"
                watch.say("slow-many-units", f"{text} instead of {count}")

    watch.on("forward", before_forward)


def calls_of_units(watch: Watch) -> None:
    """Compare the units that a forward pass calls over the ranks, and count the calls of each.

    Silent about the root, which stays unsharded, and about calls in backward, where layers are recomputed.
    """
    order: list[str] = []
    names: dict[int, str] = {}
    counts, number = Counter(), [0]

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        order.clear()
        counts.clear()
        names.clear()
        names.update({id(one): name or "the root" for name, one in module.named_modules() if isinstance(one, UNIT)})

    def before_call(module: nn.Module, args: tuple) -> None:
        name = names.get(id(module))
        if name is None or watch.in_backward:
            return
        watch.saw("units")
        order.append(name)
        counts[name] += 1
        keeps = isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group is not None
        group = module._get_fsdp_state()._fsdp_param_group if keeps else None
        if counts[name] == 2 and group is not None and group._reshard_after_forward:
            watch.say("slow-head-per-chunk", f"a forward pass calls the unit {name} again, which all-gathers it again")

    def after_forward(module: nn.Module, output: Any) -> None:
        if order and watch.several:
            number[0] += 1
            text = f"a forward pass calls the units {listed(order, 6)}"
            watch.agree("wrong-unused-units", number[0], tuple(order), text)

    watch.on("forward", before_forward)
    watch.on("call", before_call)
    watch.on("output", after_forward)


def unused_parameters(watch: Watch) -> None:
    """Compare which parameters of a unit have a gradient over the ranks, when FSDP2 reduces the unit's gradients.

    Silent if `set_reduce_scatter_unused_params` fills in zeros.
    """
    number = [0]

    def before_reduction(group: FSDPParamGroup, *_: Any) -> None:
        number[0] += 1
        if getattr(group, "reduce_scatter_unused_params", False) or not group.reduce_grads:
            return
        used = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        used = [p._param_fqn or p._module_info.param_name for p in used if p._unsharded_param.grad is not None]
        if watch.several and used:
            text = f"only {listed(used)} have a gradient in a unit of {len(group.fsdp_params)} parameters"
            watch.agree("wrong-unused-parameters", number[0], tuple(used), text)

    watch.before(FSDPParamGroup, "post_backward", before_reduction)


def waiting_gradients(watch: Watch) -> None:
    """Add up the full gradients that FSDP2 keeps on a rank because their reduction is turned off.

    Silent if a later backward pass reduces them before the optimizer steps or the script ends.
    """
    waiting: dict[int, tuple[int, int, str]] = {}

    def before_reduction(group: FSDPParamGroup, *_: Any) -> None:
        waiting.pop(id(group), None)
        if not group.reduce_grads:
            full = sum(p._unsharded_param.nbytes for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
            shards = sum(p.sharded_param.to_local().nbytes for p in group.fsdp_params)
            waiting[id(group)] = full, shards, place()

    def compare(card: str) -> None:
        if waiting:
            full, shards, lines = zip(*waiting.values(), strict=True)
            text = f"{sum(full)} bytes of full gradients wait on each rank, and nothing has reduced them"
            watch.say(card, f"{text}; this rank's shards have {sum(shards)}", lines[0])

    watch.before(FSDPParamGroup, "post_backward", before_reduction)
    watch.on("step", lambda optimizer: compare("crash-accumulation-flag"))
    watch.on("end", lambda: compare("memory-accumulation"))


def after_an_exception(watch: Watch) -> None:
    """Look, after a backward pass, for units that an earlier, failed one has left unsharded.

    Silent if no backward pass has failed.
    """
    failed: list[str] = []

    def after_backward(loss: Any, error: BaseException | None) -> None:
        if error is not None:
            failed[:] = [f"{type(error).__name__}: {error}"]
        elif failed:
            units = [(name, one) for model in watch.models() for name, one in model.named_modules()]
            units = [
                (name, one._get_fsdp_state()._fsdp_param_group) for name, one in units if isinstance(one, FSDPModule)
            ]
            left = {name or "the root" for name, group in units if group and group.is_unsharded}
            if left:
                text = f"since a backward pass raised {failed[0]}, units stay unsharded after the next one"
                watch.say("memory-after-oom", f"{text}: {listed(sorted(left))}")

    watch.on("gradients", after_backward)


def low_precision_reduction(watch: Watch) -> None:
    """Look at the dtype in which FSDP is told to reduce gradients.

    Silent about the default, which is the parameters' dtype in FSDP1 and before PyTorch 2.15.
    """

    def before_sharding(module: nn.Module, options: dict) -> None:
        policy = options.get("mp_policy") or options.get("mixed_precision")
        dtype = getattr(policy, "reduce_dtype", None)
        if dtype in LOW:
            said = f"perhaps: gradients are reduced in {str(dtype).removeprefix('torch.')}"
            watch.say(
                "wrong-bf16-reduction", f"{said}; certain, if a step's gradient norm differs from the one in fp32"
            )

    watch.on("wrap", before_sharding)


def changed_while_unsharded(watch: Watch) -> None:
    """Compare the versions of the root's unsharded parameters after a forward pass with those at the next one.

    Silent with gradients, where a backward pass reshards the root first.
    """
    left: list[tuple[str, torch.Tensor, int]] = []

    def check(*_: Any, **__: Any) -> None:
        changed = [name for name, p, version in left if p._version > version]
        if changed:
            text = f"{listed(changed)} changed while the root was unsharded; resharding it drops the change"
            watch.say("save-average-lost", text)

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        check()
        left.clear()

    def after_forward(module: nn.Module, output: Any) -> None:
        if isinstance(module, FSDPModule) and not watch.with_grad:
            group = module._get_fsdp_state()._fsdp_param_group
            params = group.fsdp_params if group and group.is_unsharded else ()
            left[:] = [(p._module_info.param_name, p._unsharded_param, p._unsharded_param._version) for p in params]

    watch.on("forward", before_forward)
    watch.on("output", after_forward)
    watch.before(FSDPModule, "reshard", check)
    watch.before(nn.Module, "state_dict", check)


PROBES = [
    one_unit,
    policy_without_units,
    split_blocks,
    calls_of_units,
    unused_parameters,
    waiting_gradients,
    after_an_exception,
    low_precision_reduction,
    changed_while_unsharded,
]
