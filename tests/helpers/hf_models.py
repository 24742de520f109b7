"""Tiny random models in Hugging Face's layout, made on the spot, with a tokenizer and data that fit them."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
)

WORDS, END, ASSISTANT = 60, 61, 63
CONTEXT = 64
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LAST_WORDS = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
OWN = {
    "qwen3": {"head_dim": 16},
    "gemma3": {"head_dim": 8, "sliding_window": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8},  # caps its logits
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "roberta": {"is_decoder": True, "pad_token_id": 1},
}
CLASSES = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "gemma2": Gemma2Config,
    "phi3": Phi3Config,
    "mixtral": MixtralConfig,
    "opt": OPTConfig,
    "bert": BertConfig,
    "roberta": RobertaConfig,
}
SMALL_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}


def config_of(kind: str, **own) -> PretrainedConfig:
    if kind == "gpt2":
        return GPT2Config(**{**SMALL_GPT2, **LAST_WORDS, **NO_DROPOUT, **own})
    return CLASSES[kind](**{**SMALL, **LAST_WORDS, **OWN.get(kind, {}), **own})


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% if m.role == 'assistant' %}<eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **own) -> Path:
    """The model with random values that matter: a larger spread than a new model's, so that a wrong one shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **own), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer(*, end: bool = True, chat: bool = True) -> PreTrainedTokenizerFast:
    special = {"<unk>": 60, "<eos>": END, "<user>": 62, "<assistant>": ASSISTANT}
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)} | special, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", **({"eos_token": "<eos>"} if end else {})
    )
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def some_words(draw: random.Random, fewest: int = 3, most: int = 24) -> str:
    first, step = draw.randrange(WORDS), draw.randrange(1, 5)
    return " ".join(f"w{(first + step * index) % WORDS}" for index in range(draw.randint(fewest, most)))


def write_text(path: Path, num_documents: int = 120) -> Path:
    draw = random.Random(0)
    path.write_text("\n\n".join(some_words(draw) for _ in range(num_documents)))
    return path


def write_chats(path: Path, num_chats: int = 60, prompt_seed: int = 0) -> Path:
    """Conversations whose prompts alone depend on `prompt_seed`; a prompt's length does not."""
    answers, prompts = random.Random(1), random.Random(2 + prompt_seed)
    lines = []
    for _ in range(num_chats):
        user = " ".join(f"w{prompts.randrange(WORDS)}" for _ in range(5))
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": some_words(answers, 3, 9)}]
        messages += [{"role": "user", "content": "w1"}, {"role": "assistant", "content": some_words(answers, 3, 9)}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path
