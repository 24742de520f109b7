"""The shape of a model from the `config.json` of Hugging Face's libraries. No torch, and no transformers."""

import json
from pathlib import Path

from fsdp_helpers.shapes import LlamaShape

READ = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # model_type -> title
LONGEST_CONTEXT = 8192  # tokens of a sequence in training, unless the model stops before; --context says otherwise


def read_config(path: str | Path) -> tuple[str, LlamaShape]:
    """Return a name and the shape of the model that a `config.json` describes.

    Raises ValueError, with the path, for a file that is not one, and for a kind of model that is not among READ.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a model's config.json, or its folder") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} has no model_type; give the config.json of a Hugging Face model")
    kind = config["model_type"]
    if kind not in READ:
        raise ValueError(f"{path}: models of type {kind!r} cannot be planned by shape, only {', '.join(READ)}")
    return f"{READ[kind]} of {path.parent.name or path.name}", shape_of(config, path)


def shape_of(config: dict, path: Path) -> LlamaShape:
    """Return the shape; the defaults of keys that are left out are those of the models' own configurations."""
    kind = config["model_type"]
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"{path} has no whole number {', '.join(missing)}, which the size of the model depends on")
    heads = config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        width=config["hidden_size"],
        depth=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        mlp_width=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=min(config.get("max_position_embeddings") or LONGEST_CONTEXT, LONGEST_CONTEXT),
        tied=bool(config.get("tie_word_embeddings", False)),
        head_size=config.get("head_dim"),
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=kind != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
