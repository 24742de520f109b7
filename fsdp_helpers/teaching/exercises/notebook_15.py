"""Exercises for notebook 15: split an MLP across ranks, label a split sequence, and choose mesh dimensions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.measuring.collectives import count_collectives, trace_collectives
from fsdp_helpers.planning.dimensions import LLAMA_70B, DimensionedRun, pipeline_bubble
from fsdp_helpers.teaching.exercises.answers import (
    DRAW,
    FRESH_CASES,
    call,
    exercise,
    expect,
    expect_answered,
    expect_number,
)
from fsdp_helpers.teaching.exercises.on_ranks import (
    RANKS,
    TOLERANCE,
    Findings,
    judge_on_ranks,
    losses_differ,
    read_module,
)
from fsdp_helpers.teaching.exercises.small_net import plain_losses, sgd

# ---------------------------------------------------------------- 1: a split MLP

WIDTH, HIDDEN, CLASSES = 10, 24, 5  # HIDDEN splits evenly across 2 or 3 ranks; WIDTH is that of `load_batch`


@exercise("15")
def check_split_mlp(module: str = "my_mlp", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 15: check that `SplitMLP(up, down, group)` splits columns, then rows, with one all-reduce in forward."""
    return judge_on_ranks(train_split_mlp, module, ("SplitMLP",), ranks)


def _named(ops: list[str]) -> str:
    return ", ".join(op.replace("_", "-") for op in ops) or "no collective"


def build_layers() -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """Build the layer before the MLP, the MLP's two layers, and the layer after it, all the same on every rank."""
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, CLASSES)


def train_split_mlp(rank: int, world_size: int, split_mlp: Callable) -> Findings:
    """Train a model with the reader's MLP in the middle, and check it; every rank has the same batch."""
    before, up, down, behind = build_layers()
    own = split_mlp(up, down, dist.group.WORLD)
    if not isinstance(own, nn.Module):
        raise TypeError(f"SplitMLP creates an object of type {type(own).__name__}; it should be an nn.Module")
    own_parts = [getattr(one, "to_local", lambda one=one: one)() for one in own.parameters()]
    kept = sum(part.untyped_storage().nbytes() // part.itemsize for part in own_parts)  # a view keeps the full tensor
    _, up, down, _ = build_layers()  # `parallelize_module` changes layers in place
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with trace_collectives() as forward:
        out = own(x)
    with trace_collectives() as backward:
        out.sum().backward()
    (gradient,) = torch.autograd.grad(down(F.gelu(up(x))).sum(), x)
    gradient_off = float("inf") if x.grad is None else (x.grad - gradient).abs().max().item()
    own.zero_grad()
    before, _, _, behind = build_layers()
    model = nn.Sequential(before, nn.Tanh(), own, behind)
    losses = plain_losses(model, sgd(model))
    before, up, down, behind = build_layers()
    plain = nn.Sequential(before, nn.Tanh(), up, nn.GELU(), down, behind)
    right = plain_losses(plain, sgd(plain))
    in_forward, in_backward = (
        [count.op for count in count_collectives(seen) for _ in range(count.count)] for seen in (forward, backward)
    )
    share = (2 * WIDTH + 1) * HIDDEN // world_size + WIDTH
    parts = f"a rank's part of both weights and of the first bias, plus the last bias, has {share}"
    yield kept > share, f"your MLP keeps {kept} values; {parts}"
    yield in_forward != ["all_reduce"], f"forward runs {_named(in_forward)}; it needs one all-reduce"
    off = "the losses don't match a single-process run"
    yield losses_differ(losses[:1], right[:1], off)
    below = "the input gradient, which the layers below need, doesn't match a single-process run"
    yield not gradient_off < TOLERANCE, below
    yield losses_differ(losses, right, off)
    yield in_backward != ["all_reduce"], f"backward runs {_named(in_backward)}; it needs one all-reduce"
    return "Right: on {ranks} ranks, the same losses, a part of each weight, and one all-reduce per pass."


# ---------------------------------------------------------------- 2: labels of a split sequence


@exercise("15")
def check_labels(module: str = "my_labels") -> str:
    """Notebook 15: check that `split(tokens, rank, world_size)` returns a rank's inputs, labels and positions."""
    split = read_module(module, "split")
    for world_size, pieces in [(2, 1), (3, 2), *((DRAW.randint(2, 6), DRAW.randint(1, 5)) for _ in range(FRESH_CASES))]:
        sequences, length = DRAW.choice((1, 3)), 2 * world_size * pieces  # odd, so a rank's part is never square
        tokens = torch.tensor([[DRAW.randint(0, 999) for _ in range(length + 1)] for _ in range(sequences)])
        _expect_split_tokens(split, tokens, world_size)
    return "Right: every label appears once, next to its token, and all ranks compute the same number of scores."


def _expect_split_tokens(split: Callable, tokens: Tensor, world_size: int) -> None:
    length = tokens.shape[1] - 1
    says = f"with {length} tokens on {world_size} ranks, "
    all_places = []
    for rank in range(world_size):
        inputs, labels, places = _three_tensors(call(split, tokens, rank, world_size), tokens, world_size, says)
        wrong = [place for place in places.tolist() if not 0 <= place < length]
        expect(not wrong, f"{says}rank {rank}: place {wrong[0] if wrong else ''} doesn't exist")
        expect(
            torch.equal(inputs, tokens[:, places]), f"{says}rank {rank}: the inputs aren't the tokens at these places"
        )
        next_ones = tokens[:, places + 1]
        if not torch.equal(labels, next_ones):
            place = places[(labels != next_ones).any(dim=0)][0].item()
            expect(False, f"{says}rank {rank}: the label at place {place} isn't the token at place {place + 1}")
        all_places += places.tolist()
    expect(sorted(all_places) == list(range(length)), f"{says}together, the ranks don't cover every place exactly once")
    scores = [sum(call(split, tokens, rank, world_size)[2].tolist()) for rank in range(world_size)]
    same = len(set(scores)) == 1
    expect(
        same, f"{says}some ranks compute more scores than others; which pairs of the 2N pieces come to the same total?"
    )


def _three_tensors(given: Any, tokens: Tensor, world_size: int, says: str) -> tuple[Tensor, Tensor, Tensor]:
    three = isinstance(given, tuple | list) and len(given) == 3 and all(isinstance(one, Tensor) for one in given)
    expect(three, f"{says}split should return three tensors: inputs, labels and places")
    own = (tokens.shape[1] - 1) // world_size
    wanted = ((len(tokens), own), (len(tokens), own), (own,))
    shapes = tuple(tuple(one.shape) for one in given)
    expect(shapes == wanted, f"{says}the shapes are {shapes}; they should be {wanted}")
    return tuple(given)


# ---------------------------------------------------------------- 3: dimensions for a cluster

NUM_GPUS, NODE, SEQUENCES, LENGTH, KV_HEADS = 1_024, 8, 512, 8_192, 8
NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S, FLOPS_PER_S = 400e9, 50e9, 400e12
MOST_COMMUNICATION, MOST_BUBBLE = 0.5, 0.25  # relative to the arithmetic's time, and to the step
NAMES = {"tensor": "tensor", "context": "context", "data": "FSDP", "pipeline": "pipeline"}  # innermost first


@exercise("15")
def check_dimensions(choice: Mapping[str, int], sent_gb: Mapping[str, float]) -> str:
    """Notebook 15: check a mesh for Llama 3.1 70B on 1,024 GPUs, and the bytes a rank sends along each dimension."""
    expect_answered(choice)
    expect_answered(sent_gb)
    wanted = ", ".join(NAMES)
    expect(isinstance(choice, Mapping) and set(choice) == set(NAMES), f"choice needs exactly these names: {wanted}")
    for name, degree in choice.items():
        expect_number(degree)
        expect(degree == int(degree) and degree >= 1, f"{name} is {degree}; it should be a whole number of ranks")
    run = DimensionedRun(**LLAMA_70B, **choice, sequences=1, length=LENGTH)
    _expect_possible(run)
    run = replace(run, sequences=SEQUENCES // run.data)
    _expect_fast(run)
    right = run.sent_bytes()
    expect(
        isinstance(sent_gb, Mapping),
        "sent_gb should be a dictionary, with a number for each dimension that has two or more ranks",
    )
    for name in NAMES:
        size = right.get(NAMES[name], 0)
        given = sent_gb.get(name, 0)
        expect_number(given)
        near = abs(given * 1e9 - size) <= 0.02 * size
        expect(near, f"along {name}, a rank doesn't send {given:,} GB per step; use the formula in the table above")
    return f"Right: the mesh uses all {NUM_GPUS:,} GPUs, the links are fast enough, and the bytes match the formulas."


def _expect_possible(run: DimensionedRun) -> None:
    product = f"{run.data} x {run.tensor} x {run.context} x {run.pipeline}"
    expect(run.num_gpus == NUM_GPUS, f"{product} is {run.num_gpus:,} GPUs, but there are {NUM_GPUS:,}")
    expect(run.tensor <= KV_HEADS, f"{KV_HEADS} key heads can't be split across {run.tensor} ranks")
    expect(
        run.data <= SEQUENCES and SEQUENCES % run.data == 0,
        f"{SEQUENCES} sequences can't be split evenly across {run.data} data ranks",
    )
    expect(
        LENGTH % (2 * run.context) == 0,
        f"{LENGTH:,} tokens can't be split evenly into a head and a tail for each of {run.context} ranks",
    )
    expect(run.layers % run.pipeline == 0, f"{run.layers} layers can't be split evenly into {run.pipeline} stages")


def _expect_fast(run: DimensionedRun) -> None:
    if run.pipeline > 1:
        bubble = pipeline_bubble(run.pipeline, run.sequences)  # a micro-batch has at least one sequence
        expect(
            bubble <= MOST_BUBBLE,
            f"with {run.sequences} micro-batches on {run.pipeline} stages, {bubble:.0%} of the step is bubble; keep "
            f"the bubble to {MOST_BUBBLE:.0%} or less",
        )
    arithmetic_s, communication_s = step_times_s(run)
    share = communication_s / arithmetic_s
    expect(
        share <= MOST_COMMUNICATION,
        f"communication takes {share:.0%} as long as the arithmetic; keep it to {MOST_COMMUNICATION:.0%} or less",
    )


def step_times_s(run: DimensionedRun) -> tuple[float, float]:
    """Return the arithmetic time and the communication time of a step in seconds, assuming no overlap.

    A node's ranks are next to each other along the inner dimensions: a dimension stays on NVLink as long as the product
    of the degrees up to and including its own is at most the number of GPUs in a node.
    """
    tokens = run.sequences * run.data * LENGTH
    arithmetic_s = 6 * run.params * tokens / NUM_GPUS / FLOPS_PER_S
    sent, reach, communication_s = run.sent_bytes(), 1, 0.0
    for name, title in NAMES.items():
        reach *= getattr(run, name)
        link = NVLINK_BYTES_PER_S if reach <= NODE else NETWORK_BYTES_PER_S
        communication_s += sent.get(title, 0) / link
    return arithmetic_s, communication_s
