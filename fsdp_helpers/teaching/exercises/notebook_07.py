"""Exercises for notebook 07: limit peak memory, accumulate gradients over micro-batches, and compute their norm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import exercise
from fsdp_helpers.teaching.exercises.on_ranks import (
    RANKS,
    TOLERANCE,
    Findings,
    judge_on_ranks,
    norm_differs,
    reduced_early,
)
from fsdp_helpers.teaching.exercises.runs import RunTask, judge_run
from fsdp_helpers.teaching.exercises.small_net import (
    NET_UNITS,
    STEPS,
    build_net,
    full_gradient,
    load_batch,
    mean_loss,
    rank_batch,
    sgd,
    shard_net,
)

LEVERS = RunTask(
    peak_bytes=80_000_000,
    world_size=2,
    fixed={"model": "vit-deep", "global_batch_size": 64, "dropout": True, "activation_checkpointing": "none"},
)
PARTS = 4  # micro-batches per rank; each of 2 or 3 ranks has 12 or 8 images


@exercise("07")
def check_levers(record: RunRecord | None) -> str:
    """Notebook 07: check that the transformer's run on two ranks peaks below 80 MB without activation checkpointing."""
    return judge_run(record, LEVERS)


@exercise("07")
def check_accumulation(module: str = "my_accumulation", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 07: check `add_up_gradients(model, parts, loss_of)`, which reduces once, and `gradient_norm(model)`."""
    names = ("add_up_gradients", "gradient_norm")
    source = f"on {{world_size}} ranks, with {PARTS} parts, rank {{rank}}: "
    return judge_on_ranks(accumulate_by_reader, module, names, ranks, source=source)


def accumulate_by_reader(rank: int, world_size: int, add_up_gradients: Callable, gradient_norm: Callable) -> Findings:
    """Run the reader's steps, then check each step's passes, reduce-scatters and gradient norms.

    Each step has four norms: the result of the reader's function, the norm of the accumulated gradient before and after
    that call, and the norm in a single process.
    """
    model, plain = shard_net(world_size), build_net()
    optimizers = sgd(model), sgd(plain)
    steps = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_loss(plain, *load_batch(step)).backward()
        inputs, labels = rank_batch(step, rank, world_size)
        with trace_collectives() as seen, record_readers_passes(model) as passes:
            add_up_gradients(model, list(zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True)), mean_loss)
        reduced = sum(event.op == "reduce_scatter" for event in seen)
        norms = ()
        if reduced:
            norm = full_gradient(model).norm().item()
            given = as_number(gradient_norm(model))
            norm_after = full_gradient(model).norm().item()
            norms = norm, given, norm_after, full_gradient(plain).norm().item()
        steps.append((reduced, passes, norms, reduced_early(seen)))
        if not reduced:
            break
        for optimizer in optimizers:
            optimizer.step()
    for reduced, passes, norms, early in steps:
        yield reduced == 0, "no gradients were reduced; which backward pass should reduce them?"
        too_many = f"a step runs {reduced} reduce-scatters, but the model has only {NET_UNITS} units"
        yield reduced > NET_UNITS, too_many, "memory-accumulation"
        yield early
        part, largest = len(inputs) // PARTS, max((images for _, images in passes), default=0)
        yield largest > part, f"a forward pass gets {largest} images; a part has only {part}"
        together = [kind for kind, _ in passes[:2]] == ["forward", "forward"]
        both = "the second forward pass comes before the first backward pass, so two parts' activations are in memory"
        yield together, both
        norm, given, norm_after, right = norms
        yield norm_differs(norm, right, world_size, PARTS)
        another = f"gradient_norm returns an object of type {given}; it should be a number or a plain tensor"
        yield not isinstance(given, float), another
        other = f"gradient_norm returns {given:.5f}, not the norm of the full gradient; whose shards does it cover?"
        yield not abs(given / norm - 1) < TOLERANCE, other, "wrong-clip-local-norm"
        yield not abs(norm_after / norm - 1) < TOLERANCE, "gradient_norm must not change the gradient"
    return "Right: on {ranks} ranks, one reduce-scatter per unit, and the norm of the full gradient."


def as_number(given: Any) -> float | str:
    """Return a number or a plain one-value tensor as a float; return the type name of anything else, even a DTensor."""
    is_number = isinstance(given, int | float | Tensor) and not isinstance(given, DTensor)
    return float(given) if is_number else type(given).__name__


@contextmanager
def record_readers_passes(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
    """Yield a list that gets a ("forward" or "backward", number of images) pair for each pass through `model`."""
    passes = []

    def note(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        images = len(output)
        passes.append(("forward", images))
        output.register_hook(lambda gradient: passes.append(("backward", images)))

    handle = model.register_forward_hook(note)
    try:
        yield passes
    finally:
        handle.remove()
