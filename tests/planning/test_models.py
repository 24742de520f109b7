"""Named models: published sizes, and blocks worked by hand. Held against real ones in `test_blocks_measured.py`."""

from dataclasses import replace

import pytest

from fsdp_helpers.models.shapes import Experts, ViTShape
from fsdp_helpers.planning.models import (
    LLAMA_SHAPES,
    NAMED_MODELS,
    LlamaShape,
    llama_head_bytes,
    llama_subject,
    named_subject,
    vit_head_bytes,
    vit_subject,
)
from fsdp_helpers.planning.transformer import decoder_block_bytes, llama_block_bytes, vit_block_bytes

PUBLISHED = {
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "vit-10b": 10_077_917_160,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
}
TINY = LlamaShape(width=8, depth=2, num_heads=4, num_kv_heads=2, mlp_width=12, vocabulary=10, context=4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    subject = named_subject(name)
    profile = subject.profile_of(1, "bf16", "units")
    assert subject.num_params == profile.num_params == PUBLISHED[name]
    assert {moment.name for moment in profile.moments if moment.event == "gradient"} == set(profile.shapes)


def test_an_unknown_model():
    with pytest.raises(ValueError, match="unknown model 'deep'; choose one of vit-mnist, .*llama-70b"):
        named_subject("deep")
    assert set(PUBLISHED) | {"vit-mnist"} == set(NAMED_MODELS)


def test_a_vit_block_hand_worked():
    # 2 tokens, h = 4, m = 16, 1 head: 8 x 4 + 2 x 16 = 64 values and 1 + 4 statistics a token
    block = vit_block_bytes(tokens=2, width=4, mlp_width=16, num_heads=1)
    assert block.kept_bytes == 4 * 2 * (64 + 5)
    assert block.input_bytes == 4 * 2 * 4
    # products: q, k, v 12, the output 4, the hidden layer 16 and 4
    assert block.products_bytes == 4 * 2 * (12 + 4 + 16 + 4)
    # in flight: 4 + 16 a token, and a weight of 16 x 4
    assert block.working_bytes == 4 * (2 * 20 + 64)
    # bf16: half of the values, not of the statistics
    assert vit_block_bytes(tokens=2, width=4, mlp_width=16, num_heads=1, value_bytes=2).kept_bytes == 2 * (128 + 20)


def test_a_llama_block_hand_worked():
    # h = 8, keys and values 4 each, m = 12, 4 heads: 6 x 8 + 2 x 4 + 4 x 12 = 104 values and 4 + 2 statistics a token
    assert TINY.kv_width == 4
    block = llama_block_bytes(tokens=3, width=8, mlp_width=12, num_heads=4, kv_width=4, value_bytes=2)
    assert block.kept_bytes == 3 * (2 * 104 + 4 * 6)
    # products: q 8, k and v 8, the output 8, two halves 24, the output 8
    assert block.products_bytes == 2 * 3 * (8 + 8 + 8 + 24 + 8)
    assert block.working_bytes == 2 * (3 * (8 + 24) + 96)


def test_the_loss_of_a_language_model():
    # 3 tokens, 10 words: log-probabilities 4 x 30, and two gradients of as much; the norm 2 x 8 values and a statistic
    head = llama_head_bytes(TINY, 3, 2)
    assert head.kept_bytes == 3 * (2 * 2 * 8 + 4) + 120
    assert head.working_bytes == 240
    # of Llama 3 8B with 8,192 tokens that is 8.4 GB, whatever the precision
    assert llama_head_bytes(LLAMA_SHAPES["llama-8b"], 8192, 2).working_bytes == 2 * 4 * 8192 * 128_256


def test_the_head_of_a_vision_transformer():
    # 2 images of 4 tokens, h = 2: the norm keeps 2 values and 2 statistics a token, backward has 2 x 2 values in flight
    shape = ViTShape(image_size=2, channels=3, patch_size=1, width=2, depth=1, num_heads=1, mlp_width=4, num_classes=3)
    in_fp32, in_bf16 = (vit_head_bytes(shape, 2, value_bytes) for value_bytes in (4, 2))
    assert (in_fp32.kept_bytes, in_fp32.working_bytes) == (8 * (4 * 2 + 4 * 2), 4 * 8 * 4)
    # bf16: half of the values, not of the statistics; and the images, 2 x 3 x 4 values, are kept as they were cast
    assert (in_bf16.kept_bytes, in_bf16.working_bytes) == (8 * (2 * 2 + 4 * 2) + 2 * 24, 2 * 8 * 4)


def test_operations_hand_worked():
    # Weights of a block: q and out 64 each, k and v 32 each, three of 96: 480; two blocks and the head, 80: 1,040.
    # 2 x 4 x 1,040, and attention over 4 tokens: 4 x 4 x 8 a token and block, 4 x 128 x 2
    llama = llama_subject("tiny", TINY)
    assert llama.forward_flops(4) == 8_320 + 1_024
    # Tokens look at those of their own sequence of 4 alone: two sequences are twice the work of one
    assert llama.forward_flops(8) == 2 * (8_320 + 1_024)
    # 1 image of 2 x 2 patches of 1 value, h = 2, m = 4, one block: qkv 12, out 4, two of 8: 32 weights, 4 tokens: 256;
    # attention 4 x 4 x 2 a token: 128; patches 2 x 4 x 1 x 2 = 16; the head 2 x 2 x 3 = 12
    vit = ViTShape(image_size=2, channels=1, patch_size=1, width=2, depth=1, num_heads=1, mlp_width=4, num_classes=3)
    assert vit_subject("tiny", vit).forward_flops(1) == 256 + 128 + 16 + 12


def test_attention_in_a_window_sees_the_window():
    """2 of 4 tokens, and all 4 in every second block: 4 x 2 x 8 and 4 x 4 x 8 a token."""
    windows = llama_subject("windows", replace(TINY, window=2, full_every=2))
    assert windows.attention_flops(4) == {"layers.0": 4 * 64, "layers.1": 4 * 128}


def test_wide_heads_pay_for_their_width():
    # heads of 5 instead of 2: q 20 wide, k and v 10; the weights of q and out 160 each, k and v 80 each, three of 96
    wide = llama_subject("wide", replace(TINY, head_size=5))
    assert wide.forward_flops(4) == 2 * 4 * (2 * (480 + 288) + 80) + 2 * 4 * 4 * 4 * 20
    assert sum(wide.attention_flops(4).values()) == 2 * 4 * 4 * 4 * 20


def test_a_loss_in_chunks_hand_worked():
    # 3 tokens in 2 chunks: 2 x 10 logits at once. In backward log-probabilities and two gradients of them in fp32, the
    # gradient of the norm's output, 2 x 3 x 8, and one more of the head's weight, 2 x 10 x 8
    head = llama_head_bytes(TINY, 3, 2, loss_chunks=2)
    assert head.kept_bytes == head.entering_bytes == 3 * (2 * 2 * 8 + 4)
    assert head.forward_bytes == (2 + 2 * 4) * 20
    assert head.inside_bytes == 3 * 4 * 20 + 48 + 160
    assert llama_head_bytes(TINY, 3, 2, loss_chunks=2, is_frozen=True).inside_bytes == 3 * 4 * 20 + 48


ROUTED = replace(TINY, experts=Experts(number=4, chosen=2, width=6, dense=frozenset({0})))


def test_a_block_with_experts_hand_worked():
    plain, routed = (decoder_block_bytes(ROUTED, block, 3, 2) for block in (0, 1))
    # two chosen experts of 6 are as wide as the ordinary layer of 12; their inputs and outputs, 4 x 8 values a token, and
    # the router's logits and probabilities, 2 x 4 in fp32, come on top
    assert plain == llama_block_bytes(tokens=3, width=8, mlp_width=12, num_heads=4, kv_width=4, value_bytes=2)
    assert routed.kept_bytes == plain.kept_bytes + 3 * (2 * 4 * 8 + 4 * 8)
    # the gradients of all four experts' last weights, 4 x 6 x 8 instead of 12 x 8, and 2 x 8 values a token
    assert routed.working_bytes == plain.working_bytes + 2 * (96 + 3 * 16)
    subject = llama_subject("routed", ROUTED)
    # two experts of three matrices of 6 x 8 are idle in one of two blocks
    assert subject.num_params - subject.active_params == 2 * 3 * 48


def test_adapters_hand_worked():
    adapted = llama_subject("tiny", TINY, lora_rank=2)
    # q, out (8, 8), k, v (4, 8), gate, up, down (12, 8): (in + out) x 2 each, two blocks
    trained = 2 * 2 * (2 * 16 + 2 * 12 + 3 * 20)
    profile = adapted.profile_of(4, "bf16", "none")
    assert (profile.num_trained, adapted.num_params) == (trained, llama_subject("tiny", TINY).num_params + trained)
    assert {moment.name.rpartition(".")[2] for moment in profile.moments if moment.event == "gradient"} == {
        "lora_a",
        "lora_b",
    }
    # backward: once for frozen weights, twice for adapters and attention
    plain, attention = 8_320, 1_024
    assert adapted.backward_of(4) == pytest.approx(
        (plain + 2 * (2 * 4 * trained + attention)) / adapted.forward_flops(4)
    )
