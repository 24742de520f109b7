"""The language model: worked by hand, and equal to Hugging Face's."""

import json
from dataclasses import replace

import pytest
import torch
from pretrained import config_of_llama, kept_shape
from torch import nn

from fsdp_helpers.models.llama import IGNORED, INITIAL_STD, Llama, Rotary, generate, rotate, summed_loss
from fsdp_helpers.models.series import count_params
from fsdp_helpers.models.shapes import (
    LLAMA_SHAPES,
    LlamaShape,
    RopeScaling,
    llama_from_config,
)

SMALL = LlamaShape(
    width=16, depth=2, num_heads=4, num_kv_heads=2, mlp_width=24, vocabulary=50, context=12, rope_base=100.0
)
# 8 frequencies in heads 16 wide: with a context of 64 the first turn 10 times, the last not once
LONG = LlamaShape(
    width=32, depth=1, num_heads=2, num_kv_heads=1, mlp_width=24, vocabulary=50, context=128, rope_base=1000.0,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64),
)  # fmt: skip
BYTES = replace(SMALL, vocabulary=256)  # a token is a byte


def small_llama(**changes) -> Llama:
    torch.manual_seed(0)
    return Llama(replace(SMALL, **changes))


def some_numbers(*shape: int, vocabulary: int = SMALL.vocabulary) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


def test_parameters():
    # a layer of 13's model: queries and output 2 x 128 x 128, keys and values 2 x 64 x 128, hidden 3 x 384 x 128,
    # two norms 2 x 128; together 196,864. The tied table 256 x 128, the last norm 128.
    assert count_params(Llama(kept_shape())) == 6 * 196_864 + 32_768 + 128 == 1_214_080
    with torch.device("meta"):
        assert count_params(Llama(LLAMA_SHAPES["llama-8b"])) == 8_030_261_248  # as published


def test_names_are_hugging_faces():
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = [f"model.layers.{number}.{name}" for number in range(2) for name in layer]
    names += ["model.embed_tokens", "model.norm", "lm_head"]
    assert set(small_llama().state_dict()) == {f"{name}.weight" for name in names}


def test_first_values():
    model = small_llama(vocabulary=4000)
    assert model.lm_head.weight.std().item() == pytest.approx(INITIAL_STD, rel=0.02)
    assert torch.equal(model.model.norm.weight, torch.ones(16))


def test_a_rotation_worked_by_hand():
    # one pair of values, a wavelength of 2 pi: position 1 turns (1, 2) by one radian,
    # to (cos 1 - 2 sin 1, 2 cos 1 + sin 1), with cos 1 = 0.5403023 and sin 1 = 0.8414710
    rotary = Rotary(replace(SMALL, width=2, num_heads=1, num_kv_heads=1))
    turned = rotate(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), *rotary(2, torch.float32))
    right = torch.tensor([[1.0, 2.0], [-1.1426397, 1.9220756]])
    assert torch.allclose(turned, right, atol=1e-6)


def test_stretched_positions_worked_by_hand():
    # LONG's frequencies are 1000^(-k/8), so in 64 tokens a pair turns 64 / (2 pi) * 1000^(-k/8) times:
    # 10.186, 4.295: more than 4, kept as 1 and 0.4216965
    # 1.811: between 1 and 4, of 0.1778279 the part (1.8113 - 1) / 3 = 0.2704468 is kept, the rest divided by 8:
    #   0.1778279 * (0.2704468 + 0.7295532 / 8) = 0.0643099
    # 0.764 and less: below 1, divided by 8: 0.0749894 / 8 = 0.0093737, 0.0316228 / 8 = 0.00395285 ...
    frequencies = Rotary(LONG).inv_freq
    assert frequencies[:5].tolist() == pytest.approx([1, 0.4216965, 0.0643099, 0.0093737, 0.00395285], rel=1e-5)
    assert torch.allclose(frequencies[5:] * 8, Rotary(replace(LONG, rope_scaling=None)).inv_freq[5:])


def test_no_token_sees_a_later_one():
    model, numbers = small_llama(), some_numbers(1, 8)
    changed = numbers.clone()
    changed[0, 5] += 1
    before, after = model(numbers), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_packed_documents_do_not_see_each_other():
    """Two documents in one sequence have the logits that each has alone: rotary positions are relative."""
    model, first, second = small_llama(), some_numbers(1, 5), some_numbers(1, 7) + 1
    second %= SMALL.vocabulary
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = model(torch.cat([first, second], dim=1), documents=documents)
    assert torch.allclose(packed, torch.cat([model(first), model(second)], dim=1), atol=1e-5)


def test_padding_counts_for_no_loss():
    model, numbers, targets = small_llama(), some_numbers(1, 6), some_numbers(1, 6)
    padded = torch.nn.functional.pad(numbers, (0, 3)), torch.nn.functional.pad(targets, (0, 3), value=IGNORED)
    assert model(*padded).item() == pytest.approx(model(numbers, targets).item(), abs=1e-5)
    assert summed_loss(torch.zeros(1, 2, 16), nn.Linear(16, 50, bias=False), torch.tensor([[3, IGNORED]])).item() == (
        pytest.approx(torch.tensor(50.0).log().item())  # equal logits for 50 words: the loss is log 50
    )


def test_a_start_on_meta_needs_the_buffers_filled():
    with torch.device("meta"):
        model = Llama(SMALL)
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "fill_buffers"):
            module.inv_freq.fill_(7)  # garbage
            module.fill_buffers()
    model.load_state_dict(small_llama().state_dict())
    assert torch.equal(model(some_numbers(1, 8)), small_llama()(some_numbers(1, 8)))


def test_generated_text():
    torch.manual_seed(0)
    model = Llama(BYTES)
    text = generate(model, "The ", 6, context=4, seed=3)
    assert text.startswith("The ") and text == generate(model, "The ", 6, context=4, seed=3)
    model.lm_head.weight.data[ord("e")] = 0  # with a hidden state of ones below, all logits but that of "x" are 0
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[ord("x")] = 1
    model.model.forward = lambda numbers, mask: torch.ones(*numbers.shape, BYTES.width)
    assert generate(model, "The ", 3, context=4) == "The xxx"


def test_seed_temperature_and_context_count():
    torch.manual_seed(0)
    model = Llama(BYTES)
    seen, logits = [], torch.linspace(0, 4, BYTES.vocabulary)

    def forward(numbers, **_):
        seen.append(numbers.shape[1])
        return logits.expand(*numbers.shape, -1)

    model.forward = forward
    texts = {generate(model, "The ", 8, context=5, seed=seed) for seed in range(3)}
    assert len(texts) == 3
    assert max(seen) == 5
    likeliest = generate(model, "The ", 8, context=5, temperature=1e-4)
    assert likeliest == (b"The " + bytes([BYTES.vocabulary - 1]) * 8).decode(errors="replace")


def test_every_norm_has_the_eps_of_the_shape():
    norms = [module for module in Llama(replace(SMALL, norm_eps=0.5)).modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == 2 * SMALL.depth + 1 and {norm.eps for norm in norms} == {0.5}


def test_the_loss_is_computed_in_fp32():
    head = nn.Linear(16, 50, bias=False, dtype=torch.bfloat16)
    loss = summed_loss(torch.ones(1, 2, 16, dtype=torch.bfloat16), head, torch.tensor([[3, 4]]))
    assert loss.dtype == torch.float32


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("shape", [SMALL, LONG, LLAMA_SHAPES["llama-8b"]])
def test_a_shape_survives_its_config(shape):
    assert llama_from_config(json.loads(json.dumps(config_of_llama(shape)))) == shape


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 also needs low_freq_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"head_dim": 8}, "head_dim 8 x 4 heads isn't the hidden_size, 16"),
    ],
)
def test_what_a_plain_llama_does_not_have_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        llama_from_config(config_of_llama(SMALL) | change)


def test_llama_31_says_its_scaling_beside_its_base():
    """As its `config.json` has it, written before `rope_parameters` were."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    config = config_of_llama(LONG) | {"rope_scaling": scaling | {"original_max_position_embeddings": 64}}
    del config["rope_parameters"]
    assert llama_from_config(config) == LONG


@pytest.mark.tools
@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, tied=True), LONG], ids=["plain", "tied", "stretched"])
def test_logits_of_transformers(shape):
    """Both ways: their model with our values, and ours with theirs."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[tools]'")
    config = transformers.LlamaConfig(**config_of_llama(shape))
    numbers = some_numbers(3, shape.context)
    torch.manual_seed(0)
    ours = Llama(shape)
    torch.manual_seed(5)
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours_of_theirs = Llama(llama_from_config(config.to_dict()))
    ours_of_theirs.load_state_dict(theirs.state_dict())
    assert torch.allclose(ours_of_theirs(numbers), theirs(numbers).logits, atol=1e-5)
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(ours(numbers), theirs(numbers).logits, atol=1e-5)
    assert not torch.allclose(ours(numbers), ours_of_theirs(numbers), atol=1e-2)  # so the comparison can fail
