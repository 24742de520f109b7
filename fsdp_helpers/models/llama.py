"""A Llama of any `LlamaShape`. Its parameters have Hugging Face's names, so its files need no key mapping.

Touvron et al. 2023, arXiv:2302.13971; grouped-query attention: Ainslie et al. 2023, arXiv:2305.13245.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.models.shapes import LlamaShape, RopeScaling

INITIAL_STD = 0.02  # of the embedding and matrices in a new model
IGNORED = -100  # a target that's left out of the loss, for padding
Loss = Callable[[Tensor, nn.Module, Tensor], Tensor]  # called with hidden states, the head, and targets


class Rotary(nn.Module):
    """Rotary position embedding: rotate pairs of values in proportion to their position (Su et al., arXiv:2104.09864).

    The frequencies are a buffer that no file contains (`persistent=False`). If the model was created on the meta
    device, call `fill_buffers`.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.base, self.scaling = shape.rope_base, shape.rope_scaling
        self.register_buffer("inv_freq", torch.empty(shape.head_width // 2), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        exponents = torch.arange(len(self.inv_freq), device=self.inv_freq.device) / len(self.inv_freq)
        frequencies = 1 / self.base**exponents
        self.inv_freq.copy_(scale_frequencies(frequencies, self.scaling) if self.scaling else frequencies)

    def forward(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines, each of shape (length, head_width), computed in fp32."""
        positions = torch.arange(length, device=self.inv_freq.device)
        angles = torch.outer(positions, self.inv_freq.float()).repeat(1, 2)  # (length, head_width)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return frequencies of shape (head_width / 2,), the low ones scaled down for longer contexts, as in Llama 3.1."""
    turns = frequencies * scaling.original_context / (2 * math.pi)  # within the first training phase's context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `heads` (N, heads, length, head_width) by angles whose `cosines` and `sines` are (length, head_width)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


class Attention(nn.Module):
    """Causal grouped-query attention, (N, length, width) -> the same: several query heads share one key/value head."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, tokens: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        projected = (self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens))
        # (N, length, width) -> (N, heads, length, head_width)
        queries, keys, values = (one.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in projected)
        queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        seen = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(seen.transpose(1, 2).flatten(2))  # (N, length, width)


class MLP(nn.Module):
    """SwiGLU, (N, length, width) -> the same: one projection gates the other (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(tokens)) * self.up_proj(tokens))


class Layer(nn.Module):
    """Attention and an MLP, each after a norm and inside a residual connection: (N, length, width) -> the same."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, tokens: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        tokens = tokens + self.self_attn(self.input_layernorm(tokens), angles, mask)
        return tokens + self.mlp(self.post_attention_layernorm(tokens))


class Decoder(nn.Module):
    """Everything except the head: token IDs (N, length) -> hidden states (N, length, width)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.rotary_emb = Rotary(shape)

    def forward(self, numbers: Tensor, mask: Tensor | None) -> Tensor:
        tokens = self.embed_tokens(numbers)
        angles = self.rotary_emb(numbers.shape[1], tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens, angles, mask)
        return self.norm(tokens)


class Llama(nn.Module):
    """A language model: token IDs (N, length) -> logits (N, length, vocabulary) or, given targets, the summed loss.

    The loss is computed inside forward, while FSDP has the head unsharded, so `loss` may process the tokens in chunks.
    If several documents are packed into one sequence, `documents` (N, length) gives the document of each token, and a
    token attends only to its own document.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.reset_matrices()

    def reset_matrices(self) -> None:
        """Draw new random values for embeddings and matrices; the norms' scales stay 1."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)

    def forward(
        self,
        numbers: Tensor,
        targets: Tensor | None = None,
        loss: Loss | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        hidden = self.model(numbers, None if documents is None else same_document(documents))
        if targets is None:
            return self.lm_head(hidden)
        return (loss or summed_loss)(hidden, self.lm_head, targets)


def same_document(documents: Tensor) -> Tensor:
    """Return a mask (N, 1, length, length): a token may attend to itself and to earlier tokens in its document."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)


def summed_loss(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """Return the sum of the tokens' losses in fp32, a scalar; unlike means, sums add up across chunks and ranks.

    `hidden` has shape (..., width), and `targets`, which may be IGNORED, has its shape without the width.
    """
    logits = head(hidden).float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def generate(
    model: nn.Module, prompt: str, num_bytes: int, *, context: int, seed: int = 0, temperature: float = 0.8
) -> str:
    """Return `prompt` followed by `num_bytes` bytes from a byte-level model. Under FSDP, every rank must call this."""
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(seed)  # on the CPU: the same draws on every rank and device
    numbers = list(prompt.encode())
    for _ in range(num_bytes):
        logits = model(torch.tensor([numbers[-context:]], device=device))[0, -1].float().cpu()
        chances = torch.softmax(logits / temperature, dim=-1)
        numbers.append(torch.multinomial(chances, 1, generator=random).item())
    return bytes(numbers).decode(errors="replace")
