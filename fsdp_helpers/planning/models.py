"""Describe models for the planner by the numbers that determine their size, without building them. No torch import."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

from fsdp_helpers.models.shapes import LLAMA_SHAPES, VIT_SHAPES, Experts, Latent, LlamaShape, ViTShape
from fsdp_helpers.planning.precisions import FP32_BYTES
from fsdp_helpers.planning.profile import ROOT, StepProfile
from fsdp_helpers.planning.transformer import (
    BlockBytes,
    HeadBytes,
    Layer,
    decoder_block_bytes,
    layers_profile,
    vit_block_bytes,
)

Shapes = dict[str, tuple[int, ...]]
VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "pure-bf16": 2, "autocast": 2}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to plan: its parameters, and the work for a batch in one process, whatever the strategy."""

    name: str
    item: str  # the items that a batch is counted in: "image", "token" or "sample"
    num_params: int
    units: tuple[str, ...]  # names of the modules that become units
    # Called with a batch, a precision and a kind of activation checkpointing; if chunks_loss is true, also with
    # `loss_chunks`.
    profile_of: Callable[..., StepProfile]
    forward_flops: Callable[[int], int] | None = None  # multiplications and additions in a batch's forward
    unit_flops: Callable[[int], dict[str, int]] | None = None  # the same by module, if known
    # The same for attention's products of tokens with tokens.
    attention_flops: Callable[[int], dict[str, int]] = lambda batch: {}
    backward_factor: float | Callable[[int], float] = 2.0  # backward's operations, as a multiple of forward's
    active_params: int | None = None  # the parameters that one token uses, if that isn't all of them
    chunks_loss: bool = False  # whether the loss can be computed in chunks
    sequence: int = 1  # items per sequence; a batch has only full sequences
    # Why the model can't run in a precision, or None if it can.
    refused: Callable[[str], str | None] = lambda precision: None

    def check(self, batch: int, precision: str, activation_checkpointing: str, loss_chunks: int = 1) -> None:
        """Raise ValueError if this model doesn't support the batch, the precision or another setting."""
        if loss_chunks > 1 and not self.chunks_loss:
            raise ValueError(
                f"--loss-chunks is only for language models that are planned from their shape; leave it out for {self.name}"
            )
        if batch % self.sequence:
            raise ValueError(
                f"a batch of {batch:,} {self.item}s isn't a multiple of the sequence length, {self.sequence:,}; use a "
                f"multiple of it, or a --context that divides the batch"
            )
        if activation_checkpointing != "none" and not self.units:
            raise ValueError(f"{self.name} has no units to recompute; pass its blocks' class as unit_class")
        if reason := self.refused(precision):
            raise ValueError(reason)

    def backward_of(self, batch: int) -> float:
        """Return the ratio of backward to forward operations, without recomputation."""
        return self.backward_factor(batch) if callable(self.backward_factor) else self.backward_factor

    def unit_flops_of(self, batch: int) -> dict[str, int]:
        """Return the number of operations in forward, by module; if we know only the total, it's under the root."""
        if self.unit_flops is not None:
            return self.unit_flops(batch)
        return {ROOT: self.forward_flops(batch)}


NAMED_MODELS = (*VIT_SHAPES, *LLAMA_SHAPES)


def named_subject(name: str) -> Subject:
    """Return the model with that name. Raises ValueError if it isn't in NAMED_MODELS."""
    if name in VIT_SHAPES:
        return vit_subject(name, VIT_SHAPES[name])
    if name in LLAMA_SHAPES:
        return llama_subject(name, LLAMA_SHAPES[name])
    raise ValueError(f"unknown model {name!r}; choose one of {', '.join(NAMED_MODELS)}")


def count_values(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _autocast_copies(layer: Layer) -> Layer:
    """Return the layer plus the bytes of its matrices' bf16 copies, which autocast keeps from forward to backward."""
    copies = 2 * count_values({name: shape for name, shape in layer.shapes.items() if len(shape) > 1})
    return replace(layer, bytes=replace(layer.bytes, kept_bytes=layer.bytes.kept_bytes + copies))


# ---------------------------------------------------------------- vision transformers


def vit_subject(name: str, shape: ViTShape) -> Subject:
    """Describe a vision transformer, whose batches are counted in images."""
    blocks = tuple(f"blocks.{number}" for number in range(shape.depth))
    block_shapes, root_shapes = vit_block_shapes(shape), vit_root_shapes(shape)

    def profile_of(images: int, precision: str, activation_checkpointing: str) -> StepProfile:
        value_bytes = VALUE_BYTES[precision]
        sizes = {"tokens": images * shape.num_tokens, "width": shape.width, "mlp_width": shape.mlp_width}
        block = vit_block_bytes(**sizes, num_heads=shape.num_heads, value_bytes=value_bytes)
        layer = Layer(shapes=block_shapes, bytes=block)
        layer = _autocast_copies(layer) if precision == "autocast" else layer
        head = vit_head_bytes(shape, images, value_bytes)
        return layers_profile(dict.fromkeys(blocks, layer), root_shapes, activation_checkpointing, head)

    return Subject(
        name=name,
        item="image",
        num_params=count_values(root_shapes) + len(blocks) * count_values(block_shapes),
        units=blocks,
        profile_of=profile_of,
        forward_flops=lambda images: sum(vit_unit_flops(shape, images).values()),
        unit_flops=partial(vit_unit_flops, shape),
        attention_flops=lambda images: dict.fromkeys(blocks, _vit_attention_flops(shape, images)),
    )


def vit_block_shapes(shape: ViTShape) -> Shapes:
    """Return one block's parameter shapes, by name."""
    width, hidden = shape.width, shape.mlp_width
    layers = {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.0": (hidden, width),
        "mlp.2": (width, hidden),
    }
    return norm_shapes("norm1", width) | norm_shapes("norm2", width) | linear_shapes(layers)


def vit_root_shapes(shape: ViTShape) -> Shapes:
    """Return the shapes of the parameters outside the blocks, by name."""
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
    """Return the head's bytes: the last norm keeps its input and two statistics, and two gradients are in flight.

    In bf16, the patch embedding also keeps the images, cast to bf16.
    """
    tokens = images * shape.num_tokens
    cast = images * shape.channels * shape.image_size**2 * value_bytes if value_bytes < FP32_BYTES else 0
    return HeadBytes(
        kept_bytes=tokens * (value_bytes * shape.width + 2 * FP32_BYTES) + cast,
        working_bytes=2 * tokens * value_bytes * shape.width,
        parameters=("head.weight", "head.bias", "norm.weight", "norm.bias"),
    )


def vit_unit_flops(shape: ViTShape, images: int) -> dict[str, int]:
    """Return the number of operations in forward, by module: 2 per weight and token, and 4 s h per token in attention.

    Here s is the number of tokens in an image, and h is the token width.
    """
    tokens = images * shape.num_tokens
    weights = count_values({n: s for n, s in vit_block_shapes(shape).items() if len(s) == 2})
    patches = images * (shape.image_size // shape.patch_size) ** 2 * shape.channels * shape.patch_size**2 * shape.width
    block = 2 * weights * tokens + _vit_attention_flops(shape, images)
    outside = 2 * patches + 2 * images * shape.width * shape.num_classes
    return {f"blocks.{number}": block for number in range(shape.depth)} | {ROOT: outside}


def _vit_attention_flops(shape: ViTShape, images: int) -> int:
    return 4 * shape.num_tokens**2 * shape.width * images


def norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear_shapes(layers: Shapes) -> Shapes:
    """Return each layer's weight and bias shapes, given its weight shape."""
    both = [((f"{name}.weight", shape), (f"{name}.bias", shape[:1])) for name, shape in layers.items()]
    return dict(pair for pairs in both for pair in pairs)


# ---------------------------------------------------------------- Llama and its relatives


def llama_subject(name: str, shape: LlamaShape, *, lora_rank: int = 0) -> Subject:
    """Describe a Llama-like model, whose batches are counted in tokens, in sequences of length `shape.context`.

    The embedding and the head are separate units; if they're tied, they belong to the root instead. With
    `lora_rank`, only two small matrices for each matrix in a block are trained (Hu et al. 2021, arXiv:2106.09685).
    """
    names = tuple(f"layers.{number}" for number in range(shape.depth))
    kinds = [shape.is_routed(number) for number in range(shape.depth)]
    blocks = {name: llama_block_shapes(shape, number) for number, name in enumerate(names)}
    root_shapes = llama_root_shapes(shape)
    frozen: set[str] = set()
    if lora_rank:
        frozen = {*root_shapes, *(f"{name}.{part}" for name, shapes in blocks.items() for part in shapes)}
        blocks = {name: shapes | adapter_shapes(shapes, lora_rank) for name, shapes in blocks.items()}
    outer_units = () if shape.tied else ("embedding", "head")

    def profile_of(
        tokens: int,
        precision: str,
        activation_checkpointing: str,
        *,
        loss_chunks: int = 1,
    ) -> StepProfile:
        value_bytes = VALUE_BYTES[precision]

        @cache
        def layer(is_routed: bool) -> Layer:
            """Describe a block. All blocks with experts are alike, and so are all blocks without them."""
            number = kinds.index(is_routed)
            block_bytes = _block_bytes(shape, number, tokens, value_bytes, lora_rank)
            found = Layer(shapes=blocks[names[number]], bytes=block_bytes)
            return _autocast_copies(found) if precision == "autocast" else found

        layers = {name: layer(is_routed) for name, is_routed in zip(names, kinds, strict=True)}
        head = llama_head_bytes(shape, tokens, value_bytes, loss_chunks=loss_chunks, is_frozen=bool(frozen))
        tied = {"head.weight": "embedding.weight"} if shape.tied else None
        return layers_profile(
            layers, root_shapes, activation_checkpointing, head, outer_units=outer_units, tied=tied, frozen=frozen
        )

    num_params = count_values(root_shapes) + sum(count_values(shapes) for shapes in blocks.values())
    return Subject(
        name=f"{name} with adapters of rank {lora_rank}" if lora_rank else name,
        item="token",
        num_params=num_params,
        units=(*outer_units[:1], *names, *outer_units[1:]),
        profile_of=profile_of,
        forward_flops=lambda tokens: sum(llama_unit_flops(shape, tokens, lora_rank).values()),
        unit_flops=lambda tokens: llama_unit_flops(shape, tokens, lora_rank),
        attention_flops=partial(llama_attention_flops, shape),
        backward_factor=(lambda tokens: _backward_of_adapters(shape, tokens, lora_rank)) if lora_rank else 2.0,
        active_params=num_params - _idle_params(shape) if shape.experts else None,
        chunks_loss=True,
        sequence=shape.context,
    )


def adapter_shapes(shapes: Shapes, rank: int) -> Shapes:
    """Return the parameter shapes of a block's adapters. Experts and the router don't get adapters."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and "expert" not in name}
    matrices = {name.removesuffix(".weight"): shape for name, shape in matrices.items() if "router" not in name}
    pairs = [{f"{name}.lora_a": (rank, old), f"{name}.lora_b": (new, rank)} for name, (new, old) in matrices.items()]
    return {name: shape for pair in pairs for name, shape in pair.items()}


def _block_bytes(shape: LlamaShape, block: int, tokens: int, value_bytes: int, lora_rank: int) -> BlockBytes:
    """Return a block's bytes. Each adapter also keeps the narrow vector between its two factors."""
    found = decoder_block_bytes(shape, block, tokens, value_bytes)
    if not lora_rank:
        return found
    adapters = len(adapter_shapes(llama_block_shapes(shape, block), lora_rank)) // 2
    return replace(found, kept_bytes=found.kept_bytes + value_bytes * tokens * adapters * lora_rank)


def llama_block_shapes(shape: LlamaShape, block: int = 0) -> Shapes:
    """Return one block's parameter shapes, by name; if only some blocks have experts, shapes depend on the block."""
    hidden = _experts_shapes(shape.width, shape.experts) if shape.is_routed(block) else _mlp_shapes(shape)
    return _attention_shapes(shape) | hidden | _norm_shapes(shape)


def _with_biases(matrices: Shapes, biased: Sequence[str] | Shapes) -> Shapes:
    weights = {f"{name}.weight": matrix for name, matrix in matrices.items()}
    return weights | {f"{name}.bias": matrices[name][:1] for name in biased}


def _attention_shapes(shape: LlamaShape) -> Shapes:
    width = shape.width
    if shape.latent:
        return _latent_shapes(width, shape.num_heads, shape.latent)
    matrices: Shapes = {
        "attention.q": (shape.q_width, width),
        "attention.k": (shape.kv_width, width),
        "attention.v": (shape.kv_width, width),
        "attention.out": (width, shape.q_width),
    }
    biased = ["attention.q", "attention.k", "attention.v"] * shape.qkv_bias + ["attention.out"] * shape.out_bias
    return _with_biases(matrices, biased) | ({"attention.sinks": (shape.num_heads,)} if shape.sinks else {})


def _latent_shapes(width: int, num_heads: int, latent: Latent) -> Shapes:
    head_width = latent.content_width + latent.rotary_width
    queries: Shapes = {"attention.q": (num_heads * head_width, width)}
    if latent.query_rank:
        queries = {
            "attention.q_down": (latent.query_rank, width),
            "attention.q_norm": (latent.query_rank,),
            "attention.q": (num_heads * head_width, latent.query_rank),
        }
    both = queries | {
        "attention.kv_down": (latent.kv_rank + latent.rotary_width, width),
        "attention.kv_norm": (latent.kv_rank,),
        "attention.kv": (num_heads * (latent.content_width + latent.value_width), latent.kv_rank),
        "attention.out": (width, num_heads * latent.value_width),
    }
    return _with_biases(both, ())


def _mlp_shapes(shape: LlamaShape) -> Shapes:
    width, hidden = shape.width, shape.mlp_width
    matrices: Shapes = {"mlp.gate": (hidden, width)} if shape.gated else {}
    matrices |= {"mlp.up": (hidden, width), "mlp.down": (width, hidden)}
    return _with_biases(matrices, matrices if shape.mlp_bias else ())


def _experts_shapes(width: int, experts: Experts) -> Shapes:
    """Return the shapes of the router and the experts: one parameter per kind of matrix, with all experts' rows.

    Plans shard these parameters by row. By default, torch shards along the expert dimension; with more ranks than
    experts, it needs a `shard_placement_fn` to shard by row.
    """
    rows, hidden, shared = experts.number * experts.width, experts.width, experts.shared_width
    shapes: Shapes = {"router.weight": (experts.number, width)}
    shapes |= {"router.bias": (experts.number,)} if experts.router_bias else {}
    shapes |= {"experts.gate_up": (2 * rows, width), "experts.down": (rows, width)}
    if experts.biases:
        shapes |= {"experts.gate_up_bias": (experts.number, 2 * hidden), "experts.down_bias": (experts.number, width)}
    if shared:
        shapes |= {"shared.gate": (shared, width), "shared.up": (shared, width), "shared.down": (width, shared)}
    return shapes | ({"shared.weighs": (1, width)} if experts.shared_gate else {})


def _norm_shapes(shape: LlamaShape) -> Shapes:
    norms = {f"norm{number}": shape.width for number in range(1, shape.num_norms + 1)}
    if shape.qk_norm:
        norms |= {"attention.q_norm": shape.head_width, "attention.k_norm": shape.head_width}
    found: Shapes = {f"{name}.weight": (size,) for name, size in norms.items()}
    return found | ({f"{name}.bias": (size,) for name, size in norms.items()} if shape.norm_bias else {})


def llama_root_shapes(shape: LlamaShape) -> Shapes:
    """Return the shapes of the parameters outside the blocks, by name; a tied head shares the embedding's weight."""
    table = (shape.vocabulary, shape.width)
    outside: Shapes = {"embedding.weight": table, "norm.weight": (shape.width,)}
    outside |= {"positions.weight": (shape.positions, shape.width)} if shape.positions else {}
    outside |= {"norm.bias": (shape.width,)} if shape.norm_bias else {}
    return outside if shape.tied else outside | {"head.weight": table}


def llama_head_bytes(
    shape: LlamaShape, tokens: int, value_bytes: int, *, loss_chunks: int = 1, is_frozen: bool = False
) -> HeadBytes:
    """Return the head's bytes: the last norm keeps its input and output, and the loss keeps fp32 log-probabilities.

    While backward goes through the loss, the gradients of the log-probabilities and the logits are also held, in fp32.
    When backward enters the head, only the gradient of the logits is left, in the head's precision. With chunks, no
    log-probabilities are kept: they're computed per chunk in forward, and again in backward. Backward then also holds
    the gradient of the norm's output, and two gradients of the head's weight: the running sum and the new one. A frozen
    head's weight has no gradient. A tied head's gradient waits until backward reaches the embedding. If logits go
    through a tanh, its output is kept.
    """
    words = -(-tokens // loss_chunks) * shape.vocabulary
    hidden = tokens * value_bytes * shape.width
    statistics = FP32_BYTES * tokens
    capped = value_bytes * words if shape.softcap else 0
    parameters = ("norm.weight",) if shape.tied else ("head.weight", "norm.weight")
    table = 0 if is_frozen else value_bytes * shape.vocabulary * shape.width
    waiting_bytes = table if shape.tied else 0
    if loss_chunks == 1:
        return HeadBytes(
            kept_bytes=2 * hidden + statistics + FP32_BYTES * words + capped,
            working_bytes=2 * FP32_BYTES * words,
            entering_bytes=2 * hidden + statistics + value_bytes * words + capped,
            parameters=parameters,
            waiting_bytes=waiting_bytes,
        )
    return HeadBytes(
        kept_bytes=2 * hidden + statistics,
        forward_bytes=(value_bytes + 2 * FP32_BYTES) * words + capped,
        entering_bytes=2 * hidden + statistics,
        inside_bytes=3 * FP32_BYTES * words + capped + hidden + table,
        parameters=parameters,
        waiting_bytes=waiting_bytes,
    )


# ---------------------------------------------------------------- operations of a Llama and its relatives


def llama_unit_flops(shape: LlamaShape, tokens: int, lora_rank: int = 0) -> dict[str, int]:
    """Return the number of forward operations, by module: 2 per token for each weight that it uses, plus attention."""
    attention = llama_attention_flops(shape, tokens)
    kinds = [shape.is_routed(number) for number in range(shape.depth)]
    weights = {kind: _used_weights(shape, kinds.index(kind), lora_rank) for kind in set(kinds)}
    blocks = {
        name: 2 * tokens * weights[kind] + flops for (name, flops), kind in zip(attention.items(), kinds, strict=True)
    }
    return blocks | {"head": 2 * tokens * shape.vocabulary * shape.width}


def llama_attention_flops(shape: LlamaShape, tokens: int) -> dict[str, int]:
    """Return the number of attention operations in forward, by block: 4 s q per token.

    s is the number of tokens that attention sees, and q is the total width of the query heads. Queries times keys take
    2 s q, as do probabilities times values. A kernel that skips masked tokens does about half as many operations.
    """
    q_width = shape.q_width
    if shape.latent:  # keys and values have different widths, so we use the average
        latent = shape.latent
        q_width = shape.num_heads * (latent.content_width + latent.rotary_width + latent.value_width) // 2
    return {
        f"layers.{number}": 4 * tokens * min(tokens, shape.seen_tokens(number)) * q_width
        for number in range(shape.depth)
    }


def _used_weights(shape: LlamaShape, block: int, lora_rank: int = 0) -> int:
    """Return how many matrix elements in a block each token is multiplied by."""
    shapes = llama_block_shapes(shape, block)
    shapes |= adapter_shapes(shapes, lora_rank) if lora_rank else {}
    weights = count_values({n: s for n, s in shapes.items() if len(s) == 2 and "bias" not in n})
    return weights - (_idle_in_a_block(shape.width, shape.experts) if shape.is_routed(block) else 0)


def _idle_in_a_block(width: int, experts: Experts) -> int:
    """Return the number of expert weights in a block that a token doesn't use."""
    return 3 * (experts.number - experts.chosen) * experts.width * width


def _idle_params(shape: LlamaShape) -> int:
    """Return the number of parameters, in all blocks, that belong to experts a token isn't sent to."""
    experts, num_routed = shape.experts, sum(shape.is_routed(block) for block in range(shape.depth))
    biases = (experts.number - experts.chosen) * (2 * experts.width + shape.width) if experts.biases else 0
    return num_routed * (_idle_in_a_block(shape.width, experts) + biases)


def _backward_of_adapters(shape: LlamaShape, tokens: int, lora_rank: int) -> float:
    """Return the ratio of backward to forward operations: 2 for adapters and attention, 1 for frozen weights."""
    forward = sum(llama_unit_flops(shape, tokens, lora_rank).values())
    plain = sum(llama_unit_flops(shape, tokens).values())
    return 1 + (forward - plain + sum(llama_attention_flops(shape, tokens).values())) / forward
