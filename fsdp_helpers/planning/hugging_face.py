"""Read a model's name and shape from its `config.json`, for the planner. No torch or transformers import.

A missing key gets the default from the model's configuration class in transformers, if there is one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_helpers.models.shapes import (
    RELATIVES,
    Experts,
    Latent,
    LlamaShape,
    check_config,
    require_sizes,
    shape_from_config,
)

LONGEST_CONTEXT = 8192  # tokens per training sequence, or fewer if that's the model's maximum; --context overrides it
Config = dict[str, Any]


def read_config(path: str | Path) -> tuple[str, LlamaShape]:
    """Return the name and shape of the model described by `path`, a `config.json` or its folder.

    Raises ValueError, with the path, if the file isn't a model's config, if the model type is unknown, or if the
    sizes are impossible.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a model's config.json, or its folder") from None
    except ValueError as error:
        raise ValueError(f"{path} isn't JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} has no model_type; give the config.json of a Hugging Face model")
    try:
        title, shape = planned_shape(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return f"{title} of {path.parent.name or path.name}", replace(shape, context=min(shape.context, LONGEST_CONTEXT))


def planned_shape(config: Config) -> tuple[str, LlamaShape]:
    """Return the model's family name and shape. Raises ValueError for an unknown family."""
    kind = config["model_type"]
    if kind in RELATIVES:
        return RELATIVES[kind][0], shape_from_config(config)
    if kind not in KINDS:
        raise ValueError(
            f"model_type {kind!r} isn't one of {', '.join([*RELATIVES, *KINDS])}; "
            "fsdp_helpers.measuring.own_plan.plan_model plans any model that a factory creates, even on the meta device"
        )
    title, read = KINDS[kind]
    return title, read(config)


def _llama_like(config: Config, *, head_size: int | None = None, kv_heads: int | None = None, **more) -> LlamaShape:
    """Return the shape described by Llama's keys; `head_size` and `kv_heads` are defaults, `more` has extra fields."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    require_sizes(config, sizes)
    width, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or head_size
    num_kv_heads = config.get("num_key_value_heads", kv_heads) or num_heads
    check_config(config | {"num_key_value_heads": num_kv_heads}, num_heads=num_heads, width=width, head_size=head_size)
    attention_bias = bool(config.get("attention_bias", False))
    shape = {
        "width": width,
        "depth": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "mlp_width": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "context": config.get("max_position_embeddings") or LONGEST_CONTEXT,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "head_size": head_size,
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
    }
    return LlamaShape(**(shape | more))


def _gpt2(config: Config) -> LlamaShape:
    usual = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    config = usual | config
    require_sizes(config, tuple(usual))
    width, num_heads = config["n_embd"], config["n_head"]
    check_config(config, num_heads=num_heads, width=width, head_size=None)
    return LlamaShape(
        width=width,
        depth=config["n_layer"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        mlp_width=config.get("n_inner") or 4 * width,
        vocabulary=config["vocab_size"],
        context=config["n_positions"],
        positions=config["n_positions"],
        tied=bool(config.get("tie_word_embeddings", True)),
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _gemma(config: Config, **more) -> LlamaShape:
    shape = _llama_like({"tie_word_embeddings": True} | config, head_size=256, **more)
    return replace(shape, softcap=bool(config.get("final_logit_softcapping")))


def _gemma2(config: Config) -> LlamaShape:
    return _gemma(config, num_norms=4, window=config.get("sliding_window", 4096), full_every=2, kv_heads=4)


def _gemma3(config: Config) -> LlamaShape:
    """Return the text model's shape. `gemma3` also has an image tower, which plans leave out."""
    usual = {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    }  # fmt: skip
    text = usual | config.get("text_config", config)
    window, every = text.get("sliding_window", 4096), text.get("sliding_window_pattern", 6)
    return _gemma(text, num_norms=4, qk_norm=True, window=window, full_every=every)


def _experts(config: Config, number: str, chosen: str, width: str, **more) -> Experts:
    """Return the experts; `number`, `chosen` and `width` are the keys to read from `config`."""
    require_sizes(config, (number, chosen, width))
    if config[chosen] > config[number]:
        raise ValueError(f"{chosen} is {config[chosen]}, but {number} is {config[number]}")
    return Experts(number=config[number], chosen=config[chosen], width=config[width], **more)


def _mixtral(config: Config) -> LlamaShape:
    experts = _experts(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return _llama_like(config, kv_heads=8, experts=experts)


def _dense_blocks(config: Config) -> frozenset[int]:
    """Return the indices of the Qwen blocks that have an ordinary MLP instead of experts."""
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    depth = config.get("num_hidden_layers") or 0
    return frozenset(block for block in range(depth) if block in only or (block + 1) % step)


def _qwen2_moe(config: Config) -> LlamaShape:
    require_sizes(config, ("shared_expert_intermediate_size",))
    shared = {"shared_width": config["shared_expert_intermediate_size"], "shared_gate": True}
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    experts = _experts(config, *keys, dense=_dense_blocks(config), **shared)
    return _llama_like(config, kv_heads=16, experts=experts, qkv_bias=True)


def _qwen3_moe(config: Config) -> LlamaShape:
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    experts = _experts(config, *keys, dense=_dense_blocks(config))
    return _llama_like(config, head_size=128, kv_heads=4, experts=experts, qk_norm=True)


def _gpt_oss(config: Config) -> LlamaShape:
    config = {"attention_bias": True, "num_experts_per_tok": config.get("experts_per_token", 4)} | config
    keys = ("num_local_experts", "num_experts_per_tok", "intermediate_size")
    experts = _experts(config, *keys, router_bias=True, biases=True)
    window = {"window": config.get("sliding_window", 128), "full_every": 2}
    return _llama_like(config, head_size=64, kv_heads=8, experts=experts, sinks=True, **window)


def _deepseek(config: Config) -> LlamaShape:
    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    require_sizes(config, (*sizes, *latent))
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    depth = config.get("num_hidden_layers") or 0
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    dense = frozenset(block for block in range(depth) if block < first or block % every)
    attention = Latent(
        query_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        content_width=config["qk_nope_head_dim"],
        rotary_width=config["qk_rope_head_dim"],
        value_width=config["v_head_dim"],
    )
    return _llama_like(
        config | {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": None},
        head_size=config["v_head_dim"],
        latent=attention,
        experts=_experts(config, *sizes, shared_width=shared, dense=dense),
    )


KINDS: dict[str, tuple[str, Callable[[Config], LlamaShape]]] = {
    "gpt2": ("GPT-2", _gpt2),
    "phi3": ("Phi-3", _llama_like),
    "gemma": ("Gemma", _gemma),
    "gemma2": ("Gemma 2", _gemma2),
    "gemma3_text": ("Gemma 3", _gemma3),
    "gemma3": ("Gemma 3 (its text model, without the image tower)", _gemma3),
    "mixtral": ("Mixtral", _mixtral),
    "qwen2_moe": ("Qwen2 with experts", _qwen2_moe),
    "qwen3_moe": ("Qwen3 with experts", _qwen3_moe),
    "gpt_oss": ("gpt-oss", _gpt_oss),
    "deepseek_v2": ("DeepSeek-V2", _deepseek),
    "deepseek_v3": ("DeepSeek-V3", _deepseek),
}
