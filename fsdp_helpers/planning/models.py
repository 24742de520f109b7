"""Models that are planned by name, from the numbers that decide their size. Nothing is built; no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

from fsdp_helpers.planning.blocks import llama_block_bytes, vit_block_bytes
from fsdp_helpers.planning.profile import StepProfile
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.transformer import BlockBytes, HeadBytes, stack_profile
from fsdp_helpers.shapes import LLAMA_SHAPES, VIT_SHAPES, LlamaShape, ViTShape

Shapes = dict[str, tuple[int, ...]]
VALUE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that can be planned for: what one process does with a batch of it, whatever the strategy."""

    name: str
    item: str  # what a batch is counted in: "image", "token", "sample"
    num_params: int
    units: tuple[str, ...]  # names of the modules that are gathered together, where the model is cut
    profile_of: Callable[[int, str, str], StepProfile]  # of a batch, a precision and a kind of activation checkpointing
    forward_flops: Callable[[int], int] | None = None  # multiplications and additions in a forward of a batch


NAMED_MODELS = (*VIT_SHAPES, *LLAMA_SHAPES)


def named_subject(name: str) -> Subject:
    """The model of that name. Raises ValueError for one that is not among NAMED_MODELS."""
    if name in VIT_SHAPES:
        return vit_subject(name, VIT_SHAPES[name])
    if name in LLAMA_SHAPES:
        return llama_subject(name, LLAMA_SHAPES[name])
    raise ValueError(f"unknown model {name!r}; choose one of {', '.join(NAMED_MODELS)}")


def count_values(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _stacked_subject(
    name: str,
    *,
    item: str,
    units: tuple[str, ...],
    block_shapes: Shapes,
    root_shapes: Shapes,
    block_bytes: Callable[[int, int], BlockBytes],  # of a batch, and of the bytes of a value
    head_bytes: Callable[[int, int], HeadBytes],
    forward_flops: Callable[[int], int],
) -> Subject:
    """A model of equal blocks, each a unit."""

    def profile_of(batch: int, precision: str, activation_checkpointing: str) -> StepProfile:
        block, head = (count(batch, VALUE_BYTES[precision]) for count in (block_bytes, head_bytes))
        return stack_profile(units, block_shapes, root_shapes, block, activation_checkpointing, head)

    return Subject(
        name=name,
        item=item,
        num_params=count_values(root_shapes) + len(units) * count_values(block_shapes),
        units=units,
        profile_of=profile_of,
        forward_flops=forward_flops,
    )


# ---------------------------------------------------------------- vision transformers


def vit_subject(name: str, shape: ViTShape) -> Subject:
    """A vision transformer; a batch counts images."""

    def block_bytes(images: int, value_bytes: int) -> BlockBytes:
        return vit_block_bytes(
            tokens=images * shape.num_tokens,
            width=shape.width,
            mlp_width=shape.mlp_width,
            num_heads=shape.num_heads,
            value_bytes=value_bytes,
        )

    return _stacked_subject(
        name,
        item="image",
        units=tuple(f"blocks.{number}" for number in range(shape.depth)),
        block_shapes=vit_block_shapes(shape),
        root_shapes=vit_root_shapes(shape),
        block_bytes=block_bytes,
        head_bytes=partial(vit_head_bytes, shape),
        forward_flops=partial(vit_forward_flops, shape),
    )


def vit_block_shapes(shape: ViTShape) -> Shapes:
    """Parameters of one block, by name."""
    width, hidden = shape.width, shape.mlp_width
    layers = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.0": (hidden, width),
        "mlp.2": (width, hidden),
    }
    return norm_shapes("norm1", width) | norm_shapes("norm2", width) | linear_shapes(layers)


def vit_root_shapes(shape: ViTShape) -> Shapes:
    """Parameters outside the blocks, by name."""
    width, patch = shape.width, shape.patch_size
    class_token = {"class_token": (1, 1, width)} if shape.class_token else {}
    return {
        "patches.weight": (width, shape.channels, patch, patch),
        "patches.bias": (width,),
        **class_token,
        "positions": (1, shape.num_tokens, width),
        **norm_shapes("norm", width),
        **linear_shapes({"head": (shape.num_classes, width)}),
    }


def vit_head_bytes(shape: ViTShape, images: int, value_bytes: int) -> HeadBytes:
    """The last norm keeps its input, h a token, and two statistics; backward has its gradient twice in flight.

    In bf16 the patches keep the images, which were cast.
    """
    tokens = images * shape.num_tokens
    cast = images * shape.channels * shape.image_size**2 * value_bytes if value_bytes < FP32_BYTES else 0
    return HeadBytes(
        kept_bytes=tokens * (value_bytes * shape.width + 2 * FP32_BYTES) + cast,
        working_bytes=2 * tokens * value_bytes * shape.width,
        parameters=("head.weight", "head.bias", "norm.weight", "norm.bias"),
    )


def vit_forward_flops(shape: ViTShape, images: int) -> int:
    """Two operations for each weight and token, and 4 s h a token for attention over s tokens."""
    tokens = images * shape.num_tokens
    weights = shape.depth * count_values({n: s for n, s in vit_block_shapes(shape).items() if len(s) == 2})
    patches = images * (shape.image_size // shape.patch_size) ** 2 * shape.channels * shape.patch_size**2 * shape.width
    attention = 4 * shape.depth * shape.num_tokens * shape.width * tokens
    return 2 * weights * tokens + attention + 2 * patches + 2 * images * shape.width * shape.num_classes


def norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear_shapes(layers: Shapes) -> Shapes:
    """Weight and bias of each layer, by the shape of its weight."""
    both = [((f"{name}.weight", shape), (f"{name}.bias", shape[:1])) for name, shape in layers.items()]
    return dict(pair for pairs in both for pair in pairs)


# ---------------------------------------------------------------- Llama-like models


def llama_subject(name: str, shape: LlamaShape) -> Subject:
    """A Llama-like model; a batch counts tokens, in sequences of `shape.context`."""

    def block_bytes(tokens: int, value_bytes: int) -> BlockBytes:
        return llama_block_bytes(
            tokens=tokens,
            width=shape.width,
            mlp_width=shape.mlp_width,
            num_heads=shape.num_heads,
            kv_width=shape.kv_width,
            value_bytes=value_bytes,
        )

    return _stacked_subject(
        name,
        item="token",
        units=tuple(f"layers.{number}" for number in range(shape.depth)),
        block_shapes=llama_block_shapes(shape),
        root_shapes=llama_root_shapes(shape),
        block_bytes=block_bytes,
        head_bytes=partial(llama_head_bytes, shape),
        forward_flops=partial(llama_forward_flops, shape),
    )


def llama_block_shapes(shape: LlamaShape) -> Shapes:
    """Parameters of one block, by name; nothing has a bias."""
    width, hidden = shape.width, shape.mlp_width
    return {
        "norm1.weight": (width,),
        "attention.q.weight": (width, width),
        "attention.k.weight": (shape.kv_width, width),
        "attention.v.weight": (shape.kv_width, width),
        "attention.out.weight": (width, width),
        "norm2.weight": (width,),
        "mlp.gate.weight": (hidden, width),
        "mlp.up.weight": (hidden, width),
        "mlp.down.weight": (width, hidden),
    }


def llama_root_shapes(shape: LlamaShape) -> Shapes:
    """Parameters outside the blocks, by name; the head is not tied to the embedding."""
    table = (shape.vocabulary, shape.width)
    return {"embedding.weight": table, "norm.weight": (shape.width,), "head.weight": table}


def llama_head_bytes(shape: LlamaShape, tokens: int, value_bytes: int) -> HeadBytes:
    """The last norm keeps input and output; the loss keeps log-probabilities in fp32, a value for each word and token.

    At the beginning of backward their gradient and that of the logits are there too, in fp32.
    """
    words = tokens * shape.vocabulary * FP32_BYTES
    return HeadBytes(
        kept_bytes=tokens * (2 * value_bytes * shape.width + FP32_BYTES) + words,
        working_bytes=2 * words,
        parameters=("head.weight", "norm.weight"),
    )


def llama_forward_flops(shape: LlamaShape, tokens: int) -> int:
    """Two operations for each weight and token, and 4 s h a token for attention, of which a mask may spare half."""
    weights = shape.depth * count_values({n: s for n, s in llama_block_shapes(shape).items() if len(s) == 2})
    head = shape.vocabulary * shape.width
    return 2 * tokens * (weights + head + 2 * shape.depth * min(tokens, shape.context) * shape.width)
