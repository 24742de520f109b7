"""The vision transformer: its counts are the published ones."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fsdp_helpers.models.series import build_model, count_params
from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import Attention, Block, ViT

# width 64: norms 4 x 64 = 256; attention 4 x (64 x 64) + 4 x 64 = 16,640; hidden 2 x (64 x 256) + 256 + 64 = 33,088
BLOCK_PARAMS = 256 + 16_640 + 33_088
# patches 16 x 64 + 64 = 1,088; positions 49 x 64 = 3,136; the last norm 128; the head 64 x 10 + 10 = 650
PARAMS = {
    "vit-mnist": 4 * BLOCK_PARAMS + 1_088 + 3_136 + 128 + 650,
    "vit-b16": 86_567_656,  # as published
    "vit-l16": 304_326_632,
    "vit-10b": 10_077_917_160,
}


@pytest.mark.parametrize("name", VIT_SHAPES)
def test_parameters(name):
    with torch.device("meta"):
        model = ViT(VIT_SHAPES[name])
    assert count_params(model) == PARAMS[name]


def test_names_of_the_parameters():
    model = ViT(replace(VIT_SHAPES["vit-mnist"], depth=1, class_token=True))
    layers = ["norm1", "attention.qkv", "attention.out", "norm2", "mlp.0", "mlp.2"]
    names = [*(f"blocks.0.{layer}" for layer in layers), "patches", "norm", "head"]
    both = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    assert {name for name, _ in model.named_parameters()} == both | {"class_token", "positions"}
    assert list(model.buffers()) == []


@pytest.mark.parametrize("class_token", [False, True])
def test_what_is_classified(class_token):
    """The class token, or the mean over the patches."""
    shape = replace(VIT_SHAPES["vit-mnist"], class_token=class_token)
    torch.manual_seed(0)
    model = ViT(shape)
    seen = []
    model.norm.register_forward_hook(lambda norm, given, tokens: seen.append(tokens))
    logits = model(torch.randn(3, 1, 28, 28))
    (tokens,) = seen
    assert tokens.shape == (3, 49 + class_token, 64)
    chosen = tokens[:, 0] if class_token else tokens.mean(dim=1)
    assert torch.equal(logits, model.head(chosen))


def test_attention_worked_by_hand():
    """One head after the other, with its own rows of queries, keys and values."""
    torch.manual_seed(0)
    attention, tokens = Attention(width=6, num_heads=2), torch.randn(1, 4, 6)
    seen = []
    for head in range(2):
        rows = [slice(3 * (3 * head + part), 3 * (3 * head + part) + 3) for part in range(3)]
        queries, keys, values = (F.linear(tokens, attention.qkv.weight[row], attention.qkv.bias[row]) for row in rows)
        seen.append((queries @ keys.transpose(1, 2) / 3**0.5).softmax(dim=-1) @ values)
    assert torch.allclose(attention(tokens), attention.out(torch.cat(seen, dim=-1)), atol=1e-6)


def test_norm_comes_first():
    """A block adds to what came in: with zeros behind each norm it changes nothing."""
    block, tokens = Block(width=8, num_heads=2, mlp_width=16), torch.randn(2, 3, 8)
    for layer in (block.attention.out, block.mlp[2]):
        torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    assert torch.equal(block(tokens), tokens)


def test_shapes_that_cannot_be():
    shape = VIT_SHAPES["vit-mnist"]
    with pytest.raises(ValueError, match="28 pixels can't be divided into patches of 5"):
        ViT(replace(shape, patch_size=5))
    with pytest.raises(ValueError, match="a width of 64 isn't divisible by 5 heads"):
        ViT(replace(shape, num_heads=5))


def test_only_what_belongs_to_no_layer_is_drawn_anew():
    model = build_model("vit-mnist")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.reset_parameters()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == ["positions"]
