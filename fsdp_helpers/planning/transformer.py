"""Calculate the memory that transformer blocks and stacks of blocks take in a step. No torch import.

Vision transformers and Llama-like models have no dropout. Their attention is fused: it doesn't store its scores, and
keeps one logarithm per token and head. (On a GPU, PyTorch 2.11 has no such kernel for grouped queries in fp32; it
stores the scores, which we don't count.) Norms and attention keep their statistics in fp32. The method comes from
Korthikanti et al. 2022, arXiv:2205.05198, section 4.1.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.precisions import FP32_BYTES
from fsdp_helpers.planning.profile import ROOT, Moment, StepProfile


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """A block's bytes in a step, for one rank's micro-batch."""

    kept_bytes: int  # kept by autograd from forward to backward, the block's input included
    input_bytes: int  # the block's input, which is all that full activation checkpointing keeps
    products_bytes: int  # the outputs of its matrix products, which selective checkpointing also keeps
    working_bytes: int  # the most in flight in the block's backward, on top of kept_bytes
    # Kept and in flight when backward is at the block's first matrix product, with all later ones' gradients finished
    leaving_bytes: int = 0

    def waiting_bytes(self, activation_checkpointing: str) -> int:
        """Return the bytes that the block keeps until backward reaches it."""
        if activation_checkpointing == "units":
            return self.input_bytes
        return self.kept_bytes if activation_checkpointing == "none" else self.input_bytes + self.products_bytes


def transformer_block_bytes(
    *, images: int, tokens: int, width: int, num_heads: int, dropout: bool = True
) -> BlockBytes:
    """Return an fp32 `nn.TransformerEncoderLayer`'s bytes on the CPU (norm first, ReLU, hidden layer 4 times as wide).

    The count follows Korthikanti et al. 2022, arXiv:2205.05198, section 4.1, adapted to this layer: fp32 instead of
    16-bit values, a second dropout in the hidden layer, masks of 4 bytes per value instead of 1, and attention step by
    step (with dropout) or fused (without). Values per token, where h is the width, a the number of heads, and s the
    number of tokens:

    - attention: the norm's input, h, and output, h; q and k, h each; v as part of q, k and v, 3 h; scores, mask and
      their product, a s each; the output projection's input, h; its dropout mask, h
    - hidden layer: the norm's input, h, and output, h; ReLU's output, its mask and their product, 4 h each; the last
      mask, h
    - both norms: their means and standard deviations, 4
    """
    values = images * tokens
    with_masks = 24 * width + 3 * num_heads * tokens + 4
    # Without dropout, there are no masks or masked copies, and scores are never written.
    fused = 12 * width + num_heads + 4
    scores = num_heads * tokens + width if dropout else 0
    return BlockBytes(
        kept_bytes=FP32_BYTES * values * (with_masks if dropout else fused),
        input_bytes=FP32_BYTES * values * width,
        products_bytes=FP32_BYTES * values * (9 * width + scores),  # q, k, v; scores and product; output; 4 h; h
        working_bytes=transformer_working_bytes(images=images, tokens=tokens, width=width),
    )


def transformer_working_bytes(*, images: int, tokens: int, width: int, value_bytes: int = FP32_BYTES) -> int:
    """Return the peak number of bytes in flight as backward enters the hidden layer of an `nn.TransformerEncoderLayer`.

    Values per token, where h is the width: the incoming gradient, h; the same gradient after the last mask, h, while
    that mask, h, is freed; and the hidden layer's gradient, 4 h. The gradient of the second weight adds 4 h x h values.
    """
    return value_bytes * (images * tokens * 5 * width + 4 * width * width)


def vit_block_bytes(*, tokens: int, width: int, mlp_width: int, num_heads: int, value_bytes: int = 4) -> BlockBytes:
    """Return the bytes of a pre-norm block with GELU, for a total of `tokens` tokens.

    Values per token, where h is `width`, m is `mlp_width`, and a is the number of heads:

    - attention: the norm's input, h, and output, h; q, k and v, 3 h; attention's output, which the projection keeps, h
    - hidden layer: the norm's input, h, and output, h; GELU's input, m, and output, m
    - in fp32: the means and standard deviations of the two norms, 4; the attention logarithms, a

    Backward peaks at one of two moments. At the hidden layer, it holds the gradients of the block's output, h, of
    GELU's output, m, and of the second weight (m x h values in all). At the end, at q, k and v, it holds all weight
    gradients, the norm's input and output, 2 h, its statistics, 2, and the gradients of q, k and v, 3 h, of their
    input, h, and of the residual connection, h.
    """
    return BlockBytes(
        kept_bytes=tokens * (value_bytes * (8 * width + 2 * mlp_width) + FP32_BYTES * (num_heads + 4)),
        input_bytes=tokens * value_bytes * width,
        products_bytes=tokens * value_bytes * (5 * width + mlp_width),
        working_bytes=value_bytes * (tokens * (width + mlp_width) + mlp_width * width),
        leaving_bytes=tokens * (value_bytes * 7 * width + FP32_BYTES * 2),
    )


def llama_block_bytes(
    *,
    tokens: int,
    width: int,
    mlp_width: int,
    num_heads: int,
    kv_width: int,
    q_width: int | None = None,  # defaults to width
    value_bytes: int = 4,
) -> BlockBytes:
    """Return the bytes of a block with RMSNorm, grouped-query attention, and SwiGLU.

    Values per token, where h is `width`, m is `mlp_width`, q is `q_width`, k is `kv_width`, and a is the number of
    heads:

    - attention: the norm's input, h, and output, h; queries, q; keys and values, k each; attention's output, q
    - hidden layer: the norm's input, h, and output, h; the gate before and after SiLU, the other half, and their
      product, m each
    - in fp32: the statistics of the two norms, 2; the attention logarithms, a

    Backward peaks at one of two moments. At SiLU, it holds the gradients of the block's output, h, of the two
    halves, 2 m, and of the last weight (m x h values in all). At the end, at the queries, it holds all weight
    gradients, the norm's input and output, 2 h, its statistic, 1, and the gradients of the queries, q, of the input to
    queries, keys and values, 2 h, and of the residual connection, h.
    """
    q_width = q_width or width
    values = 4 * width + 2 * q_width + 2 * kv_width + 4 * mlp_width
    return BlockBytes(
        kept_bytes=tokens * (value_bytes * values + FP32_BYTES * (num_heads + 2)),
        input_bytes=tokens * value_bytes * width,
        products_bytes=tokens * value_bytes * (2 * width + q_width + 2 * kv_width + 2 * mlp_width),
        working_bytes=value_bytes * (tokens * (width + 2 * mlp_width) + mlp_width * width),
        leaving_bytes=tokens * (value_bytes * (5 * width + q_width) + FP32_BYTES),
    )


def decoder_block_bytes(shape: LlamaShape, block: int, tokens: int, value_bytes: int) -> BlockBytes:
    """Return the bytes of a block in a Llama-like model: `llama_block_bytes`, plus the model's special features.

    If there's no gate, the block is counted as in `vit_block_bytes`. Further values per token:

    - norms of each head's queries and keys: their inputs, q + k, and one statistic per head
    - norms after attention and after the hidden layer: their inputs, h each, and one statistic each
    - latent attention: the latent vectors before and after their norms, and the heads' keys before they're joined
    - experts: the hidden layers of the c experts that a token is sent to, counted as one wide layer; the tokens sorted
      by expert, and the experts' outputs, c x h each; the router's logits and probabilities, in fp32

    One kernel computes all experts (a grouped product), so the gradients of all their last weights exist at the same
    time. We assume even routing.
    """
    if not shape.gated:
        sizes = {"tokens": tokens, "width": shape.width, "mlp_width": shape.mlp_width, "num_heads": shape.num_heads}
        return vit_block_bytes(**sizes, value_bytes=value_bytes)
    experts = shape.experts if shape.is_routed(block) else None
    mlp_width = experts.chosen * experts.width + experts.shared_width if experts else shape.mlp_width
    q_width, kv_width, values, statistics = shape.q_width, shape.kv_width, 0, 0
    if shape.latent:
        latent = shape.latent
        # Queries and keys are wider than values and attention's output, so we use the average
        q_width = kv_width = shape.num_heads * (latent.content_width + latent.rotary_width + latent.value_width) // 2
        values += 2 * (latent.kv_rank + (latent.query_rank or 0)) + latent.rotary_width
        values += shape.num_heads * latent.content_width
        statistics += 2
    if shape.qk_norm:
        values, statistics = values + q_width + kv_width, statistics + shape.num_heads + shape.num_kv_heads
    values, statistics = values + (shape.num_norms - 2) * shape.width, statistics + shape.num_norms - 2
    if experts:
        values, statistics = values + 2 * experts.chosen * shape.width, statistics + 2 * experts.number
    found = llama_block_bytes(
        tokens=tokens, width=shape.width, mlp_width=mlp_width, num_heads=shape.num_heads, kv_width=kv_width,
        q_width=q_width, value_bytes=value_bytes,
    )  # fmt: skip
    more = {"kept_bytes": found.kept_bytes + tokens * (value_bytes * values + FP32_BYTES * statistics)}
    if experts:
        others = experts.number * experts.width - mlp_width  # further rows of the weight gradients that exist at once
        routed = tokens * experts.chosen * shape.width  # gradients of the experts' outputs, going to the experts
        more["working_bytes"] = found.working_bytes + value_bytes * (max(0, others) * shape.width + routed)
    return replace(found, **more)


@dataclass(frozen=True, kw_only=True)
class HeadBytes:
    """The bytes of the layers after the blocks: the last norm, the head and the loss."""

    kept_bytes: int = 0  # kept from forward to backward
    forward_bytes: int = 0  # in flight in the head's forward, on top of the kept bytes
    working_bytes: int = 0  # in flight while backward goes through the loss, on top of the kept bytes
    entering_bytes: int | None = None  # held when backward enters the head; defaults to kept_bytes
    inside_bytes: int = 0  # in flight in the head's backward, on top of entering_bytes
    parameters: tuple[str, ...] = ()  # those whose gradients are finished before backward enters a block
    waiting_bytes: int = 0  # the gradient of a tied head, which waits until backward reaches the embedding


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block: its parameter shapes by name, in forward order, and its bytes in a step."""

    shapes: dict[str, tuple[int, ...]]
    bytes: BlockBytes


def stack_profile(
    blocks: Sequence[str],
    block_shapes: dict[str, tuple[int, ...]],
    root_shapes: dict[str, tuple[int, ...]],
    block: BlockBytes,
    activation_checkpointing: str = "none",
    head: HeadBytes | None = None,
    **others,
) -> StepProfile:
    """Return the step profile of a model whose `blocks` are all the same; see `layers_profile`."""
    layer = Layer(shapes=block_shapes, bytes=block)
    return layers_profile(dict.fromkeys(blocks, layer), root_shapes, activation_checkpointing, head, **others)


def layers_profile(
    layers: Mapping[str, Layer],
    root_shapes: dict[str, tuple[int, ...]],
    activation_checkpointing: str = "none",
    head: HeadBytes | None = None,
    *,
    outer_units: Sequence[str] = (),
    tied: dict[str, str] | None = None,
    frozen: Collection[str] = (),
) -> StepProfile:
    """Return the step profile of a model that consists of blocks, for one rank's images or tokens.

    Backward goes from the last block to the first. At each block, it holds the bytes that earlier blocks keep, and all
    bytes of this block, recomputed if necessary. Gradients are finished one by one; a wide block with few tokens
    peaks at the last one. Without a `head`, the layers after the blocks don't count. `outer_units`, if there are
    two, are the modules before and after the blocks. Parameters in `frozen` get no gradient.
    """
    head = head or HeadBytes()
    waiting = [layer.bytes.waiting_bytes(activation_checkpointing) for layer in layers.values()]
    before = [0, *accumulate(waiting)]  # bytes kept when forward enters each block, and at the end
    shapes = {f"{name}.{part}": shape for name, layer in layers.items() for part, shape in layer.shapes.items()}
    late = [name for name in root_shapes if name not in head.parameters]
    first, last = outer_units or (None, None)
    moments = (
        _moment("enter_forward", ROOT, 0),
        *_forward_of(first, 0),
        *_forward(layers, before),
        *_around_the_loss(last, before[-1], head),
        *_backward(layers, [size + head.waiting_bytes for size in before]),
        *((_moment("enter_backward", first, 0),) if first else ()),
        *(_moment("gradient", name, 0, head.waiting_bytes) for name in late),
    )
    return StepProfile(
        shapes=root_shapes | shapes,
        moments=tuple(moment for moment in moments if moment.event != "gradient" or moment.name not in frozen),
        frozen=frozenset(frozen),
        tied=tied or {},
    )


def _around_the_loss(name: str | None, blocks_bytes: int, head: HeadBytes) -> Iterator[Moment]:
    """Yield the events in the forward passes of the head and the loss, then in their backward passes."""
    at_the_end = blocks_bytes + head.kept_bytes
    entering = at_the_end if head.entering_bytes is None else blocks_bytes + head.entering_bytes
    yield from _forward_of(name, at_the_end, at_the_end + head.forward_bytes)
    yield _moment("leave_forward", ROOT, at_the_end, at_the_end + max(head.forward_bytes, head.working_bytes))
    yield _moment("enter_backward", ROOT, entering)
    yield _moment("enter_backward", name or ROOT, entering, entering + head.inside_bytes)
    for parameter in head.parameters:
        yield _moment("gradient", parameter, blocks_bytes + head.waiting_bytes)
        if name and parameter.startswith(f"{name}."):
            yield _moment("leave_backward", name, blocks_bytes)


def _forward_of(name: str | None, kept_bytes: int, highest_bytes: int = 0) -> Iterator[Moment]:
    """Yield the events in an outer unit's forward pass, if there is an outer unit."""
    if name:
        yield _moment("enter_forward", name, kept_bytes, highest_bytes)
        yield _moment("leave_forward", name, kept_bytes)


def _forward(layers: Mapping[str, Layer], before: Sequence[int]) -> Iterator[Moment]:
    for number, name in enumerate(layers):
        yield _moment("enter_forward", name, before[number])
        yield _moment("leave_forward", name, before[number + 1])


def _backward(layers: Mapping[str, Layer], before: Sequence[int]) -> Iterator[Moment]:
    for number, (name, layer) in reversed(list(enumerate(layers.items()))):
        block, earlier = layer.bytes, before[number]
        yield _moment("enter_backward", name, before[number + 1], earlier + block.kept_bytes + block.working_bytes)
        *finished, last = (f"{name}.{parameter}" for parameter in reversed(layer.shapes))
        yield from (_moment("gradient", parameter, earlier) for parameter in finished)
        yield _moment("gradient", last, earlier, earlier + block.leaving_bytes)
        yield _moment("leave_backward", name, earlier)


def _moment(event: str, name: str, activation_bytes: int, highest_bytes: int = 0) -> Moment:
    highest_bytes = max(activation_bytes, highest_bytes)
    return Moment(event=event, name=name, activation_bytes=activation_bytes, highest_bytes=highest_bytes)
