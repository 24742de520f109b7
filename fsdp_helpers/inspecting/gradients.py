"""Probes of a training step: the loss, its gradients, their norm, and the learning rate."""

import math
import weakref
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from fsdp_helpers.inspecting.parameters import of
from fsdp_helpers.inspecting.watch import Watch, digest, listed, local, place

SAME = ("ToCopyBackward", "ViewBackward", "SqueezeBackward", "ReshapeAliasBackward")  # they don't change a loss


def reduction(loss: Any) -> tuple[str, int]:
    """Return "mean" or "sum" and the number of values behind a loss, or ("", 0) if it's anything else."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    while node and type(node).__name__.startswith(SAME):
        node = node.next_functions[0][0]
    name = type(node).__name__
    if name.startswith("NllLoss"):
        kind = ("", "mean", "sum")[node._saved_reduction]
        return kind, int(node._saved_total_weight) if kind == "mean" else 2
    if name.startswith(("Mean", "Sum")):
        return name[:4].rstrip("B").lower(), math.prod(node._saved_self_sym_sizes)
    if hasattr(node, "_saved_reduction") and hasattr(node, "_saved_self"):
        return ("", "mean", "sum")[node._saved_reduction], node._saved_self.numel()
    return "", 0


def losses(watch: Watch) -> None:
    """Look at what a loss is a mean or a sum of, in its graph, before backward.

    Silent about a loss that's multiplied or divided afterward, about sums over batches that all ranks share, without a
    wrapper for several ranks, and about sums in which each rank has one value.
    """
    batch = [""]
    number = [0]

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        batch[0] = digest(leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor))

    def before_backward(loss: Any) -> None:
        kind, count = reduction(loss)
        number[0] += 1
        if not watch.several:
            return
        watch.saw("losses")
        if kind == "mean" and count == 0:
            watch.say("wrong-no-labels", f"the loss, {loss.item():.4g}, is a mean over 0 labels")
        elif kind == "mean":
            text = f"the loss is a mean over {count} values, and the ranks' means count the same"
            watch.agree("wrong-mean-of-means", number[0], count, text)
        elif kind == "sum" and count > 1:
            text = f"the loss, {loss.item():.4g}, is a sum, and gradients are averaged over the ranks"
            watch.agree("wrong-summed-loss", number[0], batch[0], text)

    watch.on("forward", before_forward)
    watch.on("backward", before_backward)


def not_finite(watch: Watch) -> None:
    """Look for inf and NaN in gradients after backward, in models that compute in fp16.

    Silent if a `GradScaler` scales the loss, since it skips such steps.
    """
    is_scaled, is_fp16 = [False], [False]

    def scaled(*_: Any) -> None:
        is_scaled[0] = True

    def before_sharding(module: nn.Module, options: dict) -> None:
        policy = options.get("mp_policy") or options.get("mixed_precision")
        is_fp16[0] |= getattr(policy, "param_dtype", None) == torch.float16

    def after_backward(loss: Any, error: BaseException | None) -> None:
        if is_scaled[0] or not (is_fp16[0] or torch.get_autocast_dtype("cpu") == torch.float16):
            return
        named = watch.parameters().values()
        bad = [name for name, p in named if p.grad is not None and not local(p.grad).isfinite().all()]
        if bad:
            watch.say("wrong-fp16-nan", f"the gradients of {listed(bad)} have inf or NaN")

    watch.before(torch.amp.GradScaler, "scale", scaled)
    watch.on("wrap", before_sharding)
    watch.on("gradients", after_backward)


def clipping(watch: Watch) -> None:
    """Compare the norm by which gradients are clipped over the ranks, after `clip_grad_norm_` and with `clip_grads_with_norm_`.

    Silent about a norm that's a DTensor, which is one number for all ranks, and without a wrapper for several ranks.
    """
    number = [0]

    def clipped(norm: Any) -> None:
        watch.saw("clipping")
        number[0] += 1
        if watch.several and isinstance(norm, Tensor) and not isinstance(norm, DTensor):
            text = f"gradients are clipped by this rank's own norm, {norm.item():.4g}"
            watch.agree("wrong-clip-local-norm", number[0], norm.item(), text)

    def with_norm(parameters: Any, max_norm: float, total_norm: Tensor, *_: Any, **__: Any) -> None:
        clipped(total_norm)

    watch.after(nn.utils, "clip_grad_norm_", lambda norm, *_, **__: clipped(norm))
    watch.before(nn.utils, "clip_grads_with_norm_", with_norm)


def partial_numbers(watch: Watch) -> None:
    """Look at DTensors whose value is read with `item`, `float` or an f-string.

    Silent unless a placement is partial: then each rank reads its own part of a sum.
    """

    def before_reading(tensor: Any, *_: Any) -> None:
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            text = f"a number is read from a partial DTensor: {tensor.to_local().item():.4g} is this rank's part"
            watch.say("wrong-clip-local-norm", text)

    for name in ("item", "__float__", "__format__", "tolist"):
        watch.before(Tensor, name, before_reading)


def unwrapped_calls(watch: Watch) -> None:
    """Look for calls of the module inside a DDP wrapper that don't come through it, and are followed by a backward pass.

    Silent without gradients, so an evaluation may call it.
    """
    called: list[tuple[str, str]] = []

    def before_forward(module: nn.Module, args: tuple, options: dict) -> None:
        called.clear()
        for wrapper in watch.models():
            if isinstance(wrapper, DistributedDataParallel) and wrapper.module is module and watch.with_grad:
                called.append((type(module).__name__, place()))

    def before_backward(loss: Any) -> None:
        for name, line in called if watch.several else ():
            text = f"{name} was called without its DDP wrapper before backward, so no gradients are sent"
            watch.say("wrong-unwrapped-module", text, line)

    watch.on("forward", before_forward)
    watch.on("backward", before_backward)


def repeated_steps(watch: Watch) -> None:
    """Count the steps between two calls of `zero_grad` that use gradients on top of those of an earlier step.

    Silent without a schedule that steps as often, and without `zero_grad`.
    """
    used: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # parameter -> its gradient's id and version then
    counts: dict[int, Counter] = defaultdict(Counter)

    def before_step(optimizer: torch.optim.Optimizer) -> None:
        known = [(p.grad, *used[id(optimizer)].get(id(p), (0, 0))) for p in of(optimizer)]
        grown = any(id(grad) == old and local(grad)._version > version for grad, old, version in known)
        counts[id(optimizer)].update(steps=1, grown=grown)

    def after_step(optimizer: torch.optim.Optimizer) -> None:
        grads = {id(p): p.grad for p in of(optimizer) if p.grad is not None}
        used[id(optimizer)].update({key: (id(grad), local(grad)._version) for key, grad in grads.items()})

    def zeroed(owner: Any, *_: Any, **__: Any) -> None:
        for key in [id(owner)] if isinstance(owner, torch.optim.Optimizer) else list(counts):
            seen = counts[key]
            if seen["grown"] and seen["schedule"] >= seen["steps"]:
                text = f"{seen['steps']} steps of optimizer and schedule between two calls of zero_grad"
                watch.say("wrong-schedule-steps", f"{text} use each other's gradients")
            used.pop(key, None)
            counts.pop(key, None)

    def scheduled(schedule: LRScheduler, *_: Any, **__: Any) -> None:
        counts[id(schedule.optimizer)]["schedule"] += 1

    watch.on("step", before_step)
    watch.on("stepped", after_step)
    watch.before(torch.optim.Optimizer, "zero_grad", zeroed)
    watch.before(nn.Module, "zero_grad", zeroed)
    watch.before(LRScheduler, "step", scheduled)


def learning_rates(watch: Watch) -> None:
    """Compare learning rates over the ranks after each step of a schedule, and look for a schedule that starts over.

    A schedule starts over if its optimizer was loaded with another rate than its first one and has stepped since, but it is still at step 0.
    """
    number = [0]
    loaded: dict[int, float] = {}
    stepped: set[int] = set()

    def load(optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        watch.saw("loading")
        for group in state_dict["param_groups"]:
            if group.get("initial_lr", group.get("lr")) != group.get("lr"):
                loaded[id(optimizer)] = group["lr"]
        stepped.discard(id(optimizer))

    def before_step(schedule: LRScheduler, *_: Any, **__: Any) -> None:
        rate = loaded.pop(id(schedule.optimizer), None)
        if rate is not None and schedule.last_epoch == 0 and id(schedule.optimizer) in stepped:
            watch.say("save-schedule-lost", f"the schedule is at step 0, but the loaded optimizer's rate is {rate:g}")

    def after_step(_: None, schedule: LRScheduler, *args: Any, **options: Any) -> None:
        watch.saw("schedule")
        number[0] += 1
        rates = tuple(group["lr"] for group in schedule.optimizer.param_groups)
        text = f"the learning rate is {', '.join(f'{rate:.4g}' for rate in rates)}"
        watch.agree("wrong-schedule-per-rank", number[0], rates, text)

    watch.before(torch.optim.Optimizer, "load_state_dict", load)
    watch.on("stepped", lambda optimizer: stepped.add(id(optimizer)))
    watch.before(LRScheduler, "step", before_step)
    watch.after(LRScheduler, "step", after_step)


def kept_graphs(watch: Watch) -> None:
    """Count a model's outputs whose graphs are still in memory, through a hook on each of them.

    Silent about graphs that a backward pass has gone through, and up to two of them.
    """

    class Mark:
        pass

    alive: dict[int, weakref.WeakSet] = defaultdict(weakref.WeakSet)

    def output(module: nn.Module, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                mark = Mark()
                alive[id(module)].add(mark)
                tensor.register_hook(lambda _, mark=mark: alive[id(module)].discard(mark))
        if len(alive[id(module)]) > 3:
            watch.say(
                "memory-graph-kept",
                f"the graphs of {len(alive[id(module)])} outputs are in memory, without a backward pass",
            )

    watch.on("output", output)


def gradient_layout(watch: Watch) -> None:
    """Compare the strides of gradients with those of their parameters after backward. Silent without DDP."""

    def after_backward(loss: Any, error: BaseException | None) -> None:
        for model in watch.models():
            for name, p in model.named_parameters() if isinstance(model, DistributedDataParallel) else ():
                if p.grad is not None and p.grad.stride() != p.stride():
                    text = f"the gradient of {name} has strides {p.grad.stride()}, the parameter {p.stride()}"
                    watch.say("slow-grad-strides", f"{text}, so DDP copies it in every step")

    watch.on("gradients", after_backward)


PROBES = [
    losses,
    not_finite,
    clipping,
    partial_numbers,
    unwrapped_calls,
    repeated_steps,
    learning_rates,
    kept_graphs,
    gradient_layout,
]
