"""The formulas of blocks against what autograd keeps, and arithmetic against torch's own count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.activations import count_block
from fsdp_helpers.measuring.step_profile import measure_step
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import Block, ViT
from fsdp_helpers.planning.models import named_subject
from fsdp_helpers.planning.peak import peak_of_step
from fsdp_helpers.planning.transformer import llama_block_bytes, vit_block_bytes
from fsdp_helpers.sharding.recompute import checkpoint_activations

MNIST = VIT_SHAPES["vit-mnist"]


class RMSNormByHand(torch.autograd.Function):
    """Keeps its input and one statistic a token, as the fused kernel of a GPU does."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = x.square().mean(dim=-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("only forward is counted")


class LlamaBlock(nn.Module):
    """Grouped keys and values, SwiGLU; without rotations, which keep nothing of their own."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.heads, self.kv_heads, self.size = num_heads, num_kv_heads, width // num_heads
        kv_width = num_kv_heads * self.size
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x):
        hidden = RMSNormByHand.apply(x, self.norms[0])
        q = self.q(hidden).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (layer(hidden).unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2) for layer in (self.k, self.v))
        product = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(product.transpose(1, 2).flatten(2))
        hidden = RMSNormByHand.apply(x, self.norms[1])
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


@pytest.mark.parametrize("images", [1, 8])
def test_a_vit_block_keeps_what_the_formula_says(images):
    tokens = torch.randn(images, MNIST.num_tokens, MNIST.width, requires_grad=True)
    predicted = vit_block_bytes(tokens=images * MNIST.num_tokens, width=64, mlp_width=256, num_heads=4)
    counted = count_block(Block(64, 4, 256), tokens)
    assert (counted.kept_bytes, counted.input_bytes) == (predicted.kept_bytes, predicted.input_bytes)
    assert counted.products_bytes == predicted.products_bytes


def test_a_llama_block_keeps_what_the_formula_says():
    tokens = torch.randn(1, 40, 64, requires_grad=True)
    predicted = llama_block_bytes(tokens=40, width=64, mlp_width=96, num_heads=8, kv_width=16)
    counted = count_block(LlamaBlock(64, 8, 2, 96), tokens)
    assert counted.kept_bytes == predicted.kept_bytes
    assert counted.products_bytes == predicted.products_bytes


def test_operations_are_those_that_torch_counts():
    images = torch.randn(2, 1, 28, 28)
    # Attention as plain products: of its fused kernels torch counts those of a GPU, and only later ones those of a CPU.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        ViT(MNIST)(images)
    assert named_subject("vit-mnist").forward_flops(2) == counter.get_total_flops()


@pytest.mark.parametrize("activation_checkpointing", ["none", "units"])
def test_a_named_model_peaks_where_the_measured_one_does(activation_checkpointing):
    """Nothing but numbers on one side, a step of the real model on the other."""
    subject, images = named_subject("vit-mnist"), torch.randn(32, 1, 28, 28)
    model = ViT(MNIST)
    if activation_checkpointing != "none":
        model = checkpoint_activations(model, subject.units, activation_checkpointing)
    labels = torch.zeros(32, dtype=torch.long)
    measured = measure_step(model, lambda: F.cross_entropy(model(images), labels))
    config = TrainConfig(strategy="fsdp-auto-wrap", activation_checkpointing=activation_checkpointing)
    for ranks in (2, 64):
        peaks = [
            peak_of_step(profile, config, ranks, subject.units, backend="nccl").bytes
            for profile in (subject.profile_of(32, "fp32", activation_checkpointing), measured)
        ]
        print(peaks, peaks[0] / peaks[1])
        assert peaks[0] / peaks[1] == pytest.approx(1, abs=0.05)
