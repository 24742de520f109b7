"""Bytes that blocks of vision transformers and Llama-like models keep and have in flight, counted by hand. No torch.

Both use fused attention, which doesn't store the scores but keeps a logarithm per token and head, and no dropout. Norms
and attention keep their statistics in fp32. The method is from Korthikanti et al. 2022, arXiv:2205.05198, 4.1.
"""

from dataclasses import replace

from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.state import FP32_BYTES
from fsdp_helpers.planning.transformer import BlockBytes


def vit_block_bytes(*, tokens: int, width: int, mlp_width: int, num_heads: int, value_bytes: int = 4) -> BlockBytes:
    """Count a pre-norm block with GELU, for `tokens` in all. Values per token, with h the width, m the MLP's, a heads:

    - attention: the norm's input h and output h; q, k and v 3 h; the product, which the output projection keeps, h
    - hidden layer: the norm's input h and output h; GELU's input m and output m
    - in fp32: mean and standard deviation of two norms, 4; attention's logarithms, a

    Backward is highest behind the hidden layer: the gradient that came in, h, that of GELU's output, m, and that of the
    second weight, m x h. Or at its end, at q, k and v: all weights' gradients, beside the norm's input and output, 2 h,
    its statistics, 2, the gradients of q, k and v, 3 h, of what they come from, h, and of the way around, h.
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
    q_width: int | None = None,  # as the block's, if left out
    value_bytes: int = 4,
) -> BlockBytes:
    """Count a block with RMSNorm, grouped keys and values, and SwiGLU. Values per token; k is `kv_width`, q `q_width`:

    - attention: the norm's input h and output h; queries q, keys and values k each; the product q
    - hidden layer: the norm's input h and output h; the gate before and after SiLU, the other half, their product, 4 m
    - in fp32: one statistic of each of two norms, 2; attention's logarithms, a

    Backward is highest behind SiLU: the gradient that came in, h, those of the two halves, 2 m, and that of the last
    weight, m x h. Or at its end, at the queries: all weights' gradients, beside the norm's input and output, 2 h, its
    statistic, 1, the queries' gradient, q, those of what queries, keys and values come from, 2 h, and of the way
    around, h.
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
    """Count one block of a Llama or a relative: `llama_block_bytes`, plus whatever is special to it.

    Without a gate, the block is `vit_block_bytes`. Additional values per token:

    - a norm of each head's queries and keys: its input, q + k, and one statistic per head
    - norms behind attention and the hidden layer: their inputs, h each, and a statistic each
    - latent attention: the latent vectors before and behind their norms, and the heads' keys before they are joined
    - experts: the hidden layers of those that a token goes to count as one; the tokens laid out by expert and what the
      experts say, c x h each for c chosen ones; the router's logits and probabilities in fp32

    One kernel computes all experts (a grouped product), so the gradients of all their last weights exist at the same
    time. Routing is assumed to be balanced.
    """
    if not shape.gated:
        sizes = {"tokens": tokens, "width": shape.width, "mlp_width": shape.mlp_width, "num_heads": shape.num_heads}
        return vit_block_bytes(**sizes, value_bytes=value_bytes)
    experts = shape.experts if shape.is_routed(block) else None
    mlp_width = experts.chosen * experts.width + experts.shared_width if experts else shape.mlp_width
    q_width, kv_width, values, statistics = shape.q_width, shape.kv_width, 0, 0
    if shape.latent:
        latent = shape.latent
        # queries and keys are wider than values and what attention says; on average:
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
        others = experts.number * experts.width - mlp_width  # of the weights' gradients that are there at once
        said = tokens * experts.chosen * shape.width  # their gradients, on the way to the experts
        more["working_bytes"] = found.working_bytes + value_bytes * (max(0, others) * shape.width + said)
    return replace(found, **more)
