"""What the ranks of notebook 07's build exercise run: the reader's micro-batches, and the norm of their gradient."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.collectives import trace_collectives
from fsdp_helpers.teaching.exercises.build_workers import (
    STEPS,
    build_net,
    load_batch,
    mean_loss,
    own_part,
    sgd,
    shard_net,
)
from fsdp_helpers.teaching.exercises.own_module import import_own

PARTS = 4  # of a rank's images; 2 and 3 ranks have 12 and 8 of them


def accumulate_by_reader(rank: int, world_size: int, module: str) -> list[dict[str, object]]:
    """Of each step: forwards and backwards, reduce-scatters, the reader's norm, that of what was added up, and of one
    process."""
    add_up_gradients, gradient_norm = (import_own(module, name) for name in ("add_up_gradients", "gradient_norm"))
    model, plain = shard_net(world_size), build_net()
    optimizers = sgd(model), sgd(plain)
    answers = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_loss(plain, *load_batch(step)).backward()
        inputs, labels = own_part(step, rank, world_size)
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


def as_number(given: object) -> float | str:
    """A number, or a plain tensor that holds one, as a float; of anything else, a DTensor too, the name of its type."""
    is_number = isinstance(given, int | float | Tensor) and not isinstance(given, DTensor)
    return float(given) if is_number else type(given).__name__


@contextmanager
def note_passes(model: nn.Module) -> Iterator[list[tuple[str, int]]]:
    """Within the block, note each pass of `model`: ("forward" or "backward", images in it)."""
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
