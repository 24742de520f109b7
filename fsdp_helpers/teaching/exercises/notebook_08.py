"""Exercises for notebook 08: count a transformer's parameters, find the fewest ranks it needs, and load it sharded."""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_helpers.measuring.memory import trace_memory
from fsdp_helpers.models.series import count_params
from fsdp_helpers.models.shapes import VIT_SHAPES, ViTShape
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.launch import RankError
from fsdp_helpers.sharding.strategies import unit_names
from fsdp_helpers.teaching.exercises.answers import (
    DRAW,
    FRESH_CASES,
    NotYet,
    call,
    call_or_none,
    exercise,
    expect,
    expect_whole_number,
)
from fsdp_helpers.teaching.exercises.on_ranks import (
    RANKS,
    Findings,
    first_of,
    import_from_reader,
    judge_on_ranks,
    launch_readers,
    losses_differ,
    units_differ,
)
from fsdp_helpers.teaching.exercises.small_net import (
    BLOCK_WIDTH,
    BLOCKS,
    TOKENS,
    build_blocks,
    plain_losses,
    sgd,
    train_averaging,
)

START_EXTRA_BYTES = 120_000  # the largest tensor takes 36,864 and is sent in one piece; the model takes 907,000
UNITS = ["root", *(f"blocks.{index}" for index in range(BLOCKS))]
VOCABULARY = 16
TIED = "head.weight"  # not in any file, since it's the same tensor as embed.weight
LACKING = "blocks.3.linear1.weight"  # a file without it is damaged


@exercise("08")
def check_vit_parameters(vit_parameters: Callable[..., int] | None) -> str:
    """Notebook 08: check the parameter count of a ViT, computed from the nine fields of its shape."""
    for shape in [*VIT_SHAPES.values(), *(_fresh_shape() for _ in range(FRESH_CASES))]:
        with torch.device("meta"):
            right = count_params(ViT(shape))
        given = call(vit_parameters, **asdict(shape))
        expect_whole_number(given)
        says = f"for {', '.join(f'{name}={value}' for name, value in asdict(shape).items())}, your function returns {given:,}"
        expect(given == right, f"{says}; a model with this shape has {'more' if given < right else 'fewer'}")
    return "Right for every shape, up to ten billion parameters."


def _fresh_shape() -> ViTShape:
    patch_size, num_heads = DRAW.randint(2, 16), DRAW.randint(1, 8)
    return ViTShape(
        image_size=patch_size * DRAW.randint(1, 9),
        channels=DRAW.randint(1, 4),
        patch_size=patch_size,
        width=num_heads * DRAW.randint(2, 40),
        depth=DRAW.randint(1, 9),
        num_heads=num_heads,
        mlp_width=DRAW.randint(3, 500),
        num_classes=DRAW.randint(2, 50),
        class_token=DRAW.random() < 0.5,
    )


@exercise("08")
def check_fewest_ranks(fewest_ranks: Callable[[list[int], int], int | None] | None) -> str:
    """Notebook 08: check the fewest ranks that can initialize a model layer by layer from meta, or None if none can.

    `layers` lists the number of parameters in each layer; a layer is one tensor. A device holds `device_bytes`.
    Shards aren't rounded up.
    """
    for layers, device_bytes in _starts():
        given = call_or_none(fewest_ranks, layers, device_bytes)
        says = (
            f"for layers of {layers} parameters and devices of {device_bytes:,} bytes, your function returns {given}; "
        )
        if given is None:
            # A million ranks keep next to nothing of each layer.
            expect(not _starts_on(10**6, layers, device_bytes), f"{says}with enough ranks, the model fits")
            continue
        expect_whole_number(given)
        expect(given >= 1, f"{says}there has to be at least one rank")
        expect(_starts_on(given, layers, device_bytes), f"{says}with a world size of {given}, a device is too small")
        fewer = given > 1 and _starts_on(given - 1, layers, device_bytes)
        expect(not fewer, f"{says}fewer ranks are enough")
    return "Right: more ranks make shards smaller, but the largest layer has to fit unsharded."


def _starts() -> list[tuple[list[int], int]]:
    """Return (layers, device bytes) pairs: edge cases with known outcomes, then random cases; some never fit."""
    # 4 bytes x (1,000 / N + 1,000 + 1,000 / N): 12,000 on one rank, 8,000 on two, more than 4,000 on any number
    cases = [([1_000], 12_000), ([1_000], 11_999), ([1_000], 8_000), ([1_000], 4_000), ([64] * 10, 10**9)]
    for _ in range(FRESH_CASES):
        layers = [DRAW.randint(1_000, 10**8) for _ in range(DRAW.randint(2, 12))]
        largest_bytes = 4 * max(layers)
        cases += [
            (layers, largest_bytes + DRAW.randint(largest_bytes // 9, 9 * largest_bytes)),
            (layers, largest_bytes),
        ]
    return cases


def _starts_on(world_size: int, layers: list[int], device_bytes: int) -> bool:
    """Return True if all shards, the largest layer unsharded, and a copy of its shard fit, in exact arithmetic."""
    return 4 * (sum(layers) + max(layers)) + 4 * max(layers) * world_size <= device_bytes * world_size


@exercise("08")
def check_start(module: str = "my_start", ranks: tuple[int, ...] = RANKS) -> str:
    """Notebook 08: check that `start_sharded(build, weights, mesh)` builds on meta, shards, and loads the weights."""
    praise = judge_on_ranks(start_by_reader, module, ("start_sharded",), ranks)
    _expect_short_file_refused(module, ranks[0])
    return praise


def _expect_short_file_refused(module: str, world_size: int) -> None:
    """Raise NotYet unless `start_sharded` fails on some rank when the weights lack a tensor from a block."""
    try:
        launch_readers(start_from_short_file, module, world_size)
    except RankError:
        return
    raise NotYet(
        f"start_sharded accepts weights without {LACKING} and leaves garbage in its place; only {TIED} may be missing"
    )


class PretrainedTransformer(nn.Module):
    """The transformer to load: `embed`, eight equal `blocks`, a tied `head`, and `waves`.

    It turns numbers into token IDs and predicts one token: (B, WIDTH) -> (B, VOCABULARY). `waves` is a buffer that
    isn't in any state dict; `fill_buffers` computes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, BLOCK_WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = build_blocks()
        self.head = nn.Linear(BLOCK_WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("waves", torch.empty(TOKENS, BLOCK_WIDTH), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        values = torch.arange(TOKENS * BLOCK_WIDTH, device=self.waves.device).sin()
        self.waves.copy_(values.view(TOKENS, BLOCK_WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs[:, :TOKENS].abs().mul(8).long().remainder(VOCABULARY)  # (B, TOKENS)
        hidden = self.embed(words) + self.waves  # (B, TOKENS, BLOCK_WIDTH)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


def start_by_reader(rank: int, world_size: int, start_sharded: Callable) -> Findings:
    """Load rank 0's weights with the reader's `start_sharded`, then check and train the resulting model."""
    torch.manual_seed(0)
    plain = PretrainedTransformer()
    saved = file_of(plain)  # copied before the trace begins, so it isn't counted
    right = plain_losses(plain, sgd(plain))
    torch.manual_seed(rank + 1)  # a start that draws new values gets different ones on each rank
    weights = dict(saved) if rank == 0 else {}
    with trace_memory("cpu") as trace:
        model = start_sharded(PretrainedTransformer, weights, init_device_mesh("cpu", (world_size,)))
    if not isinstance(model, nn.Module):
        raise TypeError(f"start_sharded returns an object of type {type(model).__name__}; it should return the model")
    parameters = dict(model.named_parameters())
    whole = [name for name, own in parameters.items() if not isinstance(own, DTensor)]
    yield bool(whole), f"{len(whole)} tensors aren't in any unit, including {first_of(whole)}"
    on_meta = [name for name, own in [*parameters.items(), *model.named_buffers()] if own.is_meta]
    empty = f"{len(on_meta)} tensors are still on meta, including {first_of(on_meta)}"
    yield bool(on_meta), empty, "wrong-meta-buffers"
    units, is_tied = unit_names(model), model.head.weight is model.embed.weight
    buffer_right = torch.equal(model.waves, plain.waves)
    losses = train_averaging(model, rank, world_size, lambda: None)  # FSDP averages by itself
    yield units_differ(units, UNITS)
    curve = trace.whole().curve
    extra_bytes = curve.peak_bytes - curve.held_bytes
    too_high = f"start_sharded needs {format_bytes(extra_bytes)} on top of the sharded model, enough for several layers"
    yield extra_bytes > START_EXTRA_BYTES, f"{too_high}; is the full model in memory for a moment?"
    two = "head.weight and embed.weight are now two parameters; they used to be one parameter with two names"
    yield not is_tied, two, "crash-tied-weights"
    not_sent = "the buffer has the wrong values; the right ones aren't in any file, and no rank sends them"
    yield not buffer_right, not_sent, "wrong-meta-buffers"
    other_weights = "the losses don't match those of a run with rank 0's weights"
    yield losses_differ(losses, right, other_weights, "wrong-different-seeds")
    return "Right: on {ranks} ranks, all of rank 0's weights, and never more than one full layer in memory."


def file_of(model: PretrainedTransformer) -> dict[str, Tensor]:
    """Return the model's tensors, in full shape, as safetensors stores them: a tied one only under its first name."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != TIED}


def start_from_short_file(rank: int, world_size: int, module: str) -> None:
    """Call the reader's `start_sharded` with weights that lack a tensor from a block; the call should fail."""
    start_sharded = import_from_reader(module, "start_sharded")
    weights = file_of(PretrainedTransformer())
    del weights[LACKING]
    start_sharded(PretrainedTransformer, weights if rank == 0 else {}, init_device_mesh("cpu", (world_size,)))
