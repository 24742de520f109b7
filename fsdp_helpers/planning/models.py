"""Models that are planned by name, from the numbers that decide their size. Nothing is built; no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from fsdp_helpers.models.shapes import LLAMA_SHAPES, VIT_SHAPES, LlamaShape, ViTShape
from fsdp_helpers.planning.blocks import llama_block_bytes, vit_block_bytes
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.transformer import BlockBytes, HeadBytes, stack_profile

Shapes = dict[str, tuple[int, ...]]
VALUE_BYTES = {"fp32": 4, "bf16": 2, "pure-bf16": 2, "autocast": 2}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that can be planned for: what one process does with a batch of it, whatever the strategy."""

    name: str
    item: str  # what a batch is counted in: "image", "token", "sample"
    num_params: int
    units: tuple[str, ...]  # names of the modules that are gathered together, where the model is cut
    # Of a batch, a precision, a kind of activation checkpointing and, for FSDP1, the units that it makes flat.
    profile_of: Callable[..., StepProfile]
    forward_flops: Callable[[int], int] | None = None  # multiplications and additions in a forward of a batch
    unit_flops: Callable[[int], dict[str, int]] | None = None  # the same by module, where it is known
    sequence: int = 1  # a batch is made of whole sequences of that many items
    refused: Callable[[str], str | None] = lambda precision: None  # why the model cannot run in a precision

    def check(self, batch: int, precision: str, activation_checkpointing: str) -> None:
        """Raise ValueError for a batch, a precision or a lever that this model cannot have."""
        if batch % self.sequence:
            raise ValueError(
                f"a batch of {batch:,} {self.item}s is not made of whole sequences of {self.sequence:,}; use a "
                f"multiple, or a --context that divides it"
            )
        if activation_checkpointing != "none" and not self.units:
            raise ValueError(f"{self.name} has no units, and units are what is recomputed; name their unit_class")
        if reason := self.refused(precision):
            raise ValueError(reason)

    def unit_flops_of(self, batch: int) -> dict[str, int]:
        """Return the operations of a forward by module; all in the root, if that is all that is known."""
        if self.unit_flops is not None:
            return self.unit_flops(batch)
        return {ROOT: self.forward_flops(batch)}


NAMED_MODELS = (*VIT_SHAPES, *LLAMA_SHAPES)


def named_subject(name: str) -> Subject:
    """Return the model of that name. Raises ValueError for one that is not among NAMED_MODELS."""
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
    blocks: tuple[str, ...],
    outer_units: tuple[str, ...] = (),  # outside the blocks, in front of them and behind
    block_shapes: Shapes,
    root_shapes: Shapes,
    block_bytes: Callable[[int, int], BlockBytes],  # of a batch, and of the bytes of a value
    head_bytes: Callable[[int, int], HeadBytes],
    unit_flops: Callable[[int], dict[str, int]],
    tied: dict[str, str] | None = None,
    sequence: int = 1,
) -> Subject:
    """Describe a model of equal blocks, each a unit."""

    def profile_of(
        batch: int, precision: str, activation_checkpointing: str, flat_units: Sequence[str] | None = None
    ) -> StepProfile:
        """All values are trained, so that a flat unit has no others."""
        block, head = (count(batch, VALUE_BYTES[precision]) for count in (block_bytes, head_bytes))
        if precision == "autocast":  # it keeps a bf16 copy of each matrix from forward to backward
            copies = 2 * count_values({name: shape for name, shape in block_shapes.items() if len(shape) > 1})
            block = replace(block, kept_bytes=block.kept_bytes + copies)
        return stack_profile(
            blocks, block_shapes, root_shapes, block, activation_checkpointing, head, outer_units=outer_units, tied=tied
        )

    return Subject(
        name=name,
        item=item,
        num_params=count_values(root_shapes) + len(blocks) * count_values(block_shapes),
        units=(*outer_units[:1], *blocks, *outer_units[1:]),
        profile_of=profile_of,
        forward_flops=lambda batch: sum(unit_flops(batch).values()),
        unit_flops=unit_flops,
        sequence=sequence,
    )


# ---------------------------------------------------------------- vision transformers


def vit_subject(name: str, shape: ViTShape) -> Subject:
    """Describe a vision transformer; a batch counts images."""

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
        blocks=tuple(f"blocks.{number}" for number in range(shape.depth)),
        block_shapes=vit_block_shapes(shape),
        root_shapes=vit_root_shapes(shape),
        block_bytes=block_bytes,
        head_bytes=partial(vit_head_bytes, shape),
        unit_flops=partial(vit_unit_flops, shape),
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
    """Count the head: the last norm keeps its input, h per token, and two statistics; its gradient is in flight twice.

    In bf16 the patches keep the images, which were cast.
    """
    tokens = images * shape.num_tokens
    cast = images * shape.channels * shape.image_size**2 * value_bytes if value_bytes < FP32_BYTES else 0
    return HeadBytes(
        kept_bytes=tokens * (value_bytes * shape.width + 2 * FP32_BYTES) + cast,
        working_bytes=2 * tokens * value_bytes * shape.width,
        parameters=("head.weight", "head.bias", "norm.weight", "norm.bias"),
    )


def vit_unit_flops(shape: ViTShape, images: int) -> dict[str, int]:
    """Two operations for each weight and token, and 4 s h a token for attention over s tokens."""
    tokens = images * shape.num_tokens
    weights = count_values({n: s for n, s in vit_block_shapes(shape).items() if len(s) == 2})
    patches = images * (shape.image_size // shape.patch_size) ** 2 * shape.channels * shape.patch_size**2 * shape.width
    block = 2 * weights * tokens + 4 * shape.num_tokens * shape.width * tokens
    outside = 2 * patches + 2 * images * shape.width * shape.num_classes
    return {f"blocks.{number}": block for number in range(shape.depth)} | {ROOT: outside}


def norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear_shapes(layers: Shapes) -> Shapes:
    """Weight and bias of each layer, by the shape of its weight."""
    both = [((f"{name}.weight", shape), (f"{name}.bias", shape[:1])) for name, shape in layers.items()]
    return dict(pair for pairs in both for pair in pairs)


# ---------------------------------------------------------------- Llama-like models


def llama_subject(name: str, shape: LlamaShape, *, loss_chunks: int = 1) -> Subject:
    """Describe a Llama-like model; a batch counts tokens, in sequences of `shape.context`.

    The embedding and the head are units of their own, unless they are tied and belong to the root. With `loss_chunks`
    the logits are computed for one of that many parts of the tokens after the other, and once more in backward.
    """

    def block_bytes(tokens: int, value_bytes: int) -> BlockBytes:
        return llama_block_bytes(
            tokens=tokens,
            width=shape.width,
            mlp_width=shape.mlp_width,
            num_heads=shape.num_heads,
            kv_width=shape.kv_width,
            q_width=shape.q_width,
            value_bytes=value_bytes,
        )

    return _stacked_subject(
        name,
        item="token",
        blocks=tuple(f"layers.{number}" for number in range(shape.depth)),
        outer_units=() if shape.tied else ("embedding", "head"),
        block_shapes=llama_block_shapes(shape),
        root_shapes=llama_root_shapes(shape),
        block_bytes=block_bytes,
        head_bytes=partial(llama_head_bytes, shape, loss_chunks=loss_chunks),
        unit_flops=partial(llama_unit_flops, shape),
        tied={"head.weight": "embedding.weight"} if shape.tied else None,
        sequence=shape.context,
    )


def llama_block_shapes(shape: LlamaShape) -> Shapes:
    """Parameters of one block, by name."""
    width, hidden = shape.width, shape.mlp_width
    matrices: dict[str, tuple[int, ...]] = {
        "attention.q": (shape.q_width, width),
        "attention.k": (shape.kv_width, width),
        "attention.v": (shape.kv_width, width),
        "attention.out": (width, shape.q_width),
        "mlp.gate": (hidden, width),
        "mlp.up": (hidden, width),
        "mlp.down": (width, hidden),
    }
    biased = [*_QKV] * shape.qkv_bias + ["attention.out"] * shape.out_bias + [*_MLP] * shape.mlp_bias
    norms = {"norm1": width, "norm2": width}
    if shape.qk_norm:
        norms |= {"attention.q_norm": shape.head_width, "attention.k_norm": shape.head_width}
    return (
        {f"{name}.weight": matrix for name, matrix in matrices.items()}
        | {f"{name}.bias": matrices[name][:1] for name in biased}
        | {f"{name}.weight": (size,) for name, size in norms.items()}
    )


_QKV, _MLP = ("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up", "mlp.down")


def llama_root_shapes(shape: LlamaShape) -> Shapes:
    """Parameters outside the blocks, by name; a tied head is the embedding."""
    table = (shape.vocabulary, shape.width)
    outside = {"embedding.weight": table, "norm.weight": (shape.width,)}
    return outside if shape.tied else outside | {"head.weight": table}


def llama_head_bytes(shape: LlamaShape, tokens: int, value_bytes: int, *, loss_chunks: int = 1) -> HeadBytes:
    """Count the head: the last norm keeps input and output; the loss keeps fp32 log-probabilities, per word and token.

    When backward goes through the loss their gradient and that of the logits are there too, in fp32; when it enters the
    head, only that of the logits is, in the head's precision. In chunks no log-probabilities are kept. A chunk's are
    computed in forward, and again in backward. Backward has the gradient of the norm's output beside them, and that of
    the head's weight twice: the sum so far, and the chunk's.
    """
    words = -(-tokens // loss_chunks) * shape.vocabulary
    hidden = tokens * value_bytes * shape.width
    statistics = FP32_BYTES * tokens
    parameters = ("norm.weight",) if shape.tied else ("head.weight", "norm.weight")
    if loss_chunks == 1:
        return HeadBytes(
            kept_bytes=2 * hidden + statistics + FP32_BYTES * words,
            working_bytes=2 * FP32_BYTES * words,
            entering_bytes=2 * hidden + statistics + value_bytes * words,
            parameters=parameters,
        )
    table = value_bytes * shape.vocabulary * shape.width
    return HeadBytes(
        kept_bytes=2 * hidden + statistics,
        forward_bytes=(value_bytes + 2 * FP32_BYTES) * words,
        entering_bytes=2 * hidden + statistics,
        inside_bytes=3 * FP32_BYTES * words + hidden + table,
        parameters=parameters,
    )


def llama_unit_flops(shape: LlamaShape, tokens: int) -> dict[str, int]:
    """Two operations for each weight and token, and 4 s q per token for attention (a causal mask may halve that)."""
    weights = count_values({n: s for n, s in llama_block_shapes(shape).items() if len(s) == 2})
    block = 2 * tokens * (weights + 2 * min(tokens, shape.context) * shape.q_width)
    head = 2 * tokens * shape.vocabulary * shape.width
    return {f"layers.{number}": block for number in range(shape.depth)} | {"head": head}
