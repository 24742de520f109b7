"""Exercises for notebook 07: limit peak memory, accumulate gradients over micro-batches, and compute their norm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.records import RunRecord
from fsdp_helpers.teaching.exercises.answers import exercise, expect
from fsdp_helpers.teaching.exercises.on_ranks import RANKS, TOLERANCE, import_own, in_words, read_module, run_on_ranks
from fsdp_helpers.teaching.exercises.runs import RunTask, judge_run
from fsdp_helpers.teaching.exercises.small_net import (
    NET_UNITS,
    STEPS,
    build_net,
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
    read_module(module, "add_up_gradients")
    read_module(module, "gradient_norm")
    for world_size in ranks:
        for rank, steps in enumerate(run_on_ranks(accumulate_by_reader, module, world_size)):
            for step in steps:
                _expect_accumulated(step, f"on {world_size} ranks, with {PARTS} parts, rank {rank}: ")
    return f"Right: on {in_words(ranks)} ranks, one reduce-scatter per unit, and the norm of the full gradient."


def _expect_accumulated(step: dict[str, Any], says: str) -> None:
    expect(step["reduced"] > 0, f"{says}no gradients were reduced; which backward pass should reduce them?")
    expect(
        step["reduced"] <= NET_UNITS,
        f"{says}a step runs {step['reduced']} reduce-scatters, but the model has only {NET_UNITS} units",
        "memory-accumulation",
    )
    largest = max((images for _, images in step["passes"]), default=0)
    expect(largest <= step["part"], f"{says}a forward pass gets {largest} images; a part has only {step['part']}")
    kinds = [kind for kind, _ in step["passes"]]
    expect(
        kinds[:2] != ["forward", "forward"],
        f"{says}the second forward pass comes before the first backward pass, so two parts' activations are in memory",
    )
    ratio = step["norm"] / step["right_norm"]
    expect(
        abs(ratio - 1) < TOLERANCE,
        f"{says}the gradient norm is {ratio:.2f} times the norm in a single process",
        "wrong-summed-loss",
    )
    given = step["given_norm"]
    expect(
        isinstance(given, float),
        f"{says}gradient_norm returns an object of type {given}; it should be a number or a plain tensor",
    )
    expect(
        abs(given / step["norm"] - 1) < TOLERANCE,
        f"{says}gradient_norm returns {given:.5f}, not the norm of the full gradient; whose shards does it cover?",
        "wrong-clip-local-norm",
        "wrong-clip-local-norm",
    )
    expect(abs(step["norm_after"] / step["norm"] - 1) < TOLERANCE, f"{says}gradient_norm must not change the gradient")


def accumulate_by_reader(rank: int, world_size: int, module: str) -> list[dict[str, Any]]:
    """Run the reader's steps; return the passes, reduce-scatters and gradient norms for each step.

    Each step has four norms: the result of the reader's function, the norm of the accumulated gradient before and after
    that call, and the norm in a single process.
    """
    add_up_gradients, gradient_norm = (import_own(module, name) for name in ("add_up_gradients", "gradient_norm"))
    model, plain = shard_net(world_size), build_net()
    optimizers = sgd(model), sgd(plain)
    answers = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_loss(plain, *load_batch(step)).backward()
        inputs, labels = rank_batch(step, rank, world_size)
        with trace_collectives() as seen, note_passes(model) as passes:
            add_up_gradients(model, list(zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True)), mean_loss)
        reduced = sum(event.op == "reduce_scatter" for event in seen)
        answers.append({"reduced": reduced, "passes": passes, "part": len(inputs) // PARTS})
        if not reduced:
            return answers
        answers[-1] |= {
            "norm": norm_of([parameter.grad.full_tensor() for parameter in model.parameters()]),
            "given_norm": as_number(gradient_norm(model)),
            "norm_after": norm_of([parameter.grad.full_tensor() for parameter in model.parameters()]),
            "right_norm": norm_of([parameter.grad for parameter in plain.parameters()]),
        }
        for optimizer in optimizers:
            optimizer.step()
    return answers


def norm_of(gradients: list[Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def as_number(given: Any) -> float | str:
    """Return a number or a plain one-value tensor as a float; return the type name of anything else, even a DTensor."""
    is_number = isinstance(given, int | float | Tensor) and not isinstance(given, DTensor)
    return float(given) if is_number else type(given).__name__


@contextmanager
def note_passes(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
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
