"""A standard vision transformer of any `ViTShape`, from laptop size to ten billion parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.models.shapes import ViTShape

POSITION_STD = 0.02  # of newly initialized positions and class tokens, as in Dosovitskiy et al. 2020, arXiv:2010.11929


class Attention(nn.Module):
    """Multi-head attention without a causal mask: (N, tokens, width) -> (N, tokens, width).

    The rows of `qkv` are ordered by head, and within a head by query, key and value. So a rank whose shard consists of
    full heads can compute their attention without the other shards, as tensor parallelism requires.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"a width of {width} isn't divisible by {num_heads} heads")
        self.head_width = width // num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.qkv(tokens).unflatten(-1, (-1, 3, self.head_width))  # (N, tokens, heads, 3, head_width)
        queries, keys, values = heads.permute(3, 0, 2, 1, 4)  # (N, heads, tokens, head_width) each
        seen = F.scaled_dot_product_attention(queries, keys, values)
        return self.out(seen.transpose(1, 2).flatten(2))  # (N, tokens, width)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and inside a residual connection: (N, tokens, width) -> the same."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_width), nn.GELU(), nn.Linear(mlp_width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class ViT(nn.Module):
    """A vision transformer that classifies images: (N, channels, size, size) -> logits (N, classes).

    The head gets the class token or, if there is none, the mean over all tokens. `reset_parameters` initializes the
    parameters that aren't in a layer, so that a model created on the meta device can be filled module by module.
    """

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        if shape.image_size % shape.patch_size:
            raise ValueError(f"{shape.image_size} pixels can't be divided into patches of {shape.patch_size}")
        width = shape.width
        self.patches = nn.Conv2d(shape.channels, width, kernel_size=shape.patch_size, stride=shape.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if shape.class_token else None
        self.positions = nn.Parameter(torch.empty(1, shape.num_tokens, width))
        self.blocks = nn.Sequential(*[Block(width, shape.num_heads, shape.mlp_width) for _ in range(shape.depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for own in self.parameters(recurse=False):
            nn.init.normal_(own, std=POSITION_STD)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)  # (N, patches, width)
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = self.norm(self.blocks(tokens + self.positions))  # (N, tokens, width)
        return self.head(tokens[:, 0] if self.class_token is not None else tokens.mean(dim=1))
