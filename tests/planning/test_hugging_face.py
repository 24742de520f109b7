"""config.json files of published models: exact numbers of parameters, those of their cards; and files that are wrong."""

import json

import pytest

from fsdp_helpers.__main__ import main
from fsdp_helpers.planning.hugging_face import planned_shape, read_config
from fsdp_helpers.planning.models import llama_subject


def sizes(width: int, depth: int, heads: int, kv_heads: int, hidden: int, words: int, **more) -> dict:
    return {
        "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": hidden, "vocab_size": words, **more,
    }  # fmt: skip


def experts(number: int, chosen: int, width: int, **more) -> dict:
    return {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": width, **more}


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = LATENT | {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536}
LITE = LATENT | {"n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None}
OSS = {"sliding_window": 128, "head_dim": 64, "quantization_config": {"quant_method": "mxfp4"}}
# The file; all parameters, and those that a token goes through, where they are fewer; and where the first number stands:
# "KerasHub" is keras-team/keras-hub, src/models/*/*_presets.py ("params"); "safetensors" and "GGUF" are the totals that
# the Hugging Face Hub reads from a repository's files; others are named. What cards say of MoE models is below.
CARDS = {
    "gpt2": ({}, 124_439_808, None, "KerasHub gpt2_base_en"),
    "phi3 (Phi-4)": (sizes(5120, 40, 40, 10, 17920, 100352), 14_659_507_200, None, "GGUF microsoft/phi-4"),
    "gemma2 (2B)": (
        sizes(2304, 26, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888, None, "KerasHub gemma2_2b_en",
    ),
    "gemma3_text (1B)": (sizes(1152, 26, 4, 1, 6912, 262144, head_dim=256), 999_885_952, None, "KerasHub gemma3_1b"),
    "gemma3 (4B, its text model)": (
        {"text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}},
        3_880_263_168,
        None,
        "GGUF lmstudio-community/gemma-3-4b-it-GGUF",
    ),
    "qwen3 (0.6B, without head_dim)": (
        sizes(1024, 28, 16, 8, 3072, 151936, tie_word_embeddings=True), 596_049_920, None,
        "vllm-project/compressed-tensors, a test: `model.num_parameters()`",
    ),
    "mixtral (8x7B)": (
        sizes(4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704, 12_879_925_248,
        "KerasHub mixtral_8_7b_en",
    ),
    "qwen3_moe (30B-A3B)": (
        sizes(2048, 48, 32, 4, 6144, 151936, head_dim=128, **experts(128, 8, 768)), 30_532_122_624, 3_353_032_704,
        "GGUF unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF",
    ),
    "qwen2_moe (A2.7B)": (
        sizes(2048, 24, 16, 16, 5632, 151936, shared_expert_intermediate_size=5632, **experts(60, 4, 1408)),
        14_315_784_192,
        2_689_173_504,
        "KerasHub qwen1.5_moe_2.7b_en",
    ),
    "gpt_oss (120b)": (
        sizes(2880, 36, 64, 8, 2880, 201088, num_local_experts=128, experts_per_token=4, **OSS), 116_829_156_672,
        5_711_982_912, "safetensors openai/gpt-oss-120b",
    ),
    "deepseek_v3": (
        sizes(7168, 61, 128, 128, 18432, 129280, num_experts_per_tok=8, moe_intermediate_size=2048, **DEEPSEEK),
        671_026_404_352,
        37_552_282_624,
        "its card: 671B, the module for multi-token prediction left out",
    ),
    "deepseek_v2 (Lite)": (
        sizes(2048, 27, 16, 16, 10944, 102400, num_experts_per_tok=6, moe_intermediate_size=1408, **LITE),
        15_706_484_224,
        2_661_150_208,
        "foldl/chatllm.cpp, README: parameters of the model that it serves",
    ),
}  # fmt: skip
ACTIVE = {  # billions, as the models' cards have them, and whether their count leaves the table of embeddings out
    "mixtral (8x7B)": (12.9, False),  # mistral.ai/news/mixtral-of-experts
    "qwen3_moe (30B-A3B)": (3.3, False),  # huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen2_moe (A2.7B)": (2.7, False),  # qwenlm.github.io/blog/qwen-moe
    "gpt_oss (120b)": (5.1, True),  # gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925, table 1
    "deepseek_v3": (37, True),  # arXiv:2412.19437
    "deepseek_v2 (Lite)": (2.4, True),  # arXiv:2405.04434, appendix B
}


def subject_of(name: str, config: dict):
    return llama_subject(*planned_shape({"model_type": name.split()[0]} | config))


@pytest.mark.parametrize("name", CARDS)
def test_a_published_model_has_its_published_number_of_parameters(name):
    config, num_params, active, _ = CARDS[name]
    subject = subject_of(name, config)
    assert (subject.num_params, subject.active_params) == (num_params, active)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_goes_through_as_many_as_the_card_says(name):
    """Cards round, some of them down."""
    config, _, active, _ = CARDS[name]
    said, without_table = ACTIVE[name]
    table = config["vocab_size"] * config["hidden_size"] if without_table else 0
    assert (active - table) / 1e9 == pytest.approx(said, abs=0.06 if said < 30 else 0.5)


def test_a_token_pays_for_the_experts_that_it_goes_to():
    mixtral = subject_of("mixtral", CARDS["mixtral (8x7B)"][0])
    # two operations for each weight of a matrix that a token goes through, the embedding left out, and attention
    one = mixtral.forward_flops(4096) - sum(mixtral.attention_flops(4096).values())
    matrices = mixtral.active_params - 32_000 * 4096 - 65 * 4096  # a table that is looked up, and norms
    assert one == 2 * 4096 * matrices


def test_windows_shorten_attention():
    flops = subject_of("gemma2", CARDS["gemma2 (2B)"][0] | {"max_position_embeddings": 8192}).attention_flops(8192)
    assert flops["layers.1"] == 2 * flops["layers.0"]  # every second block looks back 4,096 tokens, not 8,192


LLAMA = sizes(3072, 28, 24, 8, 8192, 128256, model_type="llama")
ROUTED = sizes(64, 2, 4, 2, 128, 100, model_type="qwen3_moe", **experts(8, 2, 32))
WRONG = [
    ({"model_type": "bert"}, "model_type 'bert' isn't one of llama, mistral"),
    ({"model_type": "bert"}, "own_plan.plan_model plans any model"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be 1 or more"),
    ({"vocab_size": "many"}, "no whole number for vocab_size"),
    ({"num_attention_heads": 25}, "num_attention_heads 25 doesn't divide hidden_size 3072"),
    ({"num_key_value_heads": 7}, "num_key_value_heads 7 doesn't divide num_attention_heads 24"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be a JSON object"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type llama3 also needs factor"),
    ({"num_local_experts": 8}, "num_local_experts is 8, but model_type 'llama' has no experts"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "'bitsandbytes': weights quantized to 4",
    ),
    (ROUTED | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_experts is 8"),
    ({"model_type": "deepseek_v3"}, "no whole number for n_routed_experts"),
]


@pytest.mark.parametrize("changes, message", WRONG)
def test_a_file_that_is_wrong_ends_in_one_line_and_status_2(changes, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    assert main(["plan", "--config", str(tmp_path), "--world-size", "8", "--device-memory-gb", "80"]) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1 and said.out == ""


def test_experts_may_be_in_every_second_block():
    blocks = ROUTED | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert planned_shape(blocks)[1].experts.dense == {0, 2, 3, 4}  # counted from 1, the second has experts


def test_the_title_says_what_is_left_out(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3"} | CARDS["gemma3 (4B, its text model)"][0])
    )
    assert read_config(tmp_path)[0].startswith("Gemma 3 (its text model, without the image tower) of ")
