"""Numbers that decide the size of a transformer. Models are built from them, and plans are made from them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ViTShape:
    """A vision transformer: patches, a class token where asked for, equal blocks, a norm and a head."""

    image_size: int  # images are square
    channels: int
    patch_size: int
    width: int  # of a token
    depth: int  # blocks
    num_heads: int
    mlp_width: int  # of a block's hidden layer
    num_classes: int
    class_token: bool = False  # else the mean over all tokens is classified

    @property
    def num_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + self.class_token


VIT_SHAPES = {
    "vit-mnist": ViTShape(
        image_size=28, channels=1, patch_size=4, width=64, depth=4, num_heads=4, mlp_width=256, num_classes=10
    ),
    # Dosovitskiy et al. 2020, arXiv:2010.11929, table 1. With ImageNet's 1,000 classes: 86,567,656 parameters ...
    "vit-b16": ViTShape(
        image_size=224, channels=3, patch_size=16, width=768, depth=12, num_heads=12, mlp_width=3072,
        num_classes=1000, class_token=True,
    ),
    # ... and 304,326,632
    "vit-l16": ViTShape(
        image_size=224, channels=3, patch_size=16, width=1024, depth=24, num_heads=16, mlp_width=4096,
        num_classes=1000, class_token=True,
    ),
    # the 10-billion-parameter example of PyTorch/XLA's FSDP, which averages the tokens: 10,077,917,160 parameters
    "vit-10b": ViTShape(
        image_size=224, channels=3, patch_size=14, width=5120, depth=32, num_heads=32, mlp_width=20480,
        num_classes=1000,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Rotary positions stretched as Llama 3.1 does, for contexts longer than those it first learned from.

    A pair of values that turns less than `low_freq_factor` times within `original_context` turns `factor` times slower,
    one that turns more than `high_freq_factor` times stays as it is, and between the two the change is gradual.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama-like language model: grouped keys and values, rotary positions, SwiGLU, RMSNorm."""

    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    vocabulary: int
    context: int = 8192  # tokens of a sequence
    tied: bool = False  # the head's table is the embedding's
    rope_base: float = 500_000.0  # of the rotary positions' wavelengths
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    # Relatives of Llama, which are planned only
    head_size: int | None = None  # of one head, if it is not width / num_heads
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm of each head's queries and keys

    @property
    def head_width(self) -> int:
        return self.head_size or self.width // self.num_heads

    @property
    def q_width(self) -> int:
        return self.head_width * self.num_heads

    @property
    def kv_width(self) -> int:
        return self.head_width * self.num_kv_heads


LLAMA_SHAPES = {
    # The Llama 3 herd of models, 2024, arXiv:2407.21783, table 3: 8,030,261,248 and 70,553,706,496 parameters.
    "llama-8b": LlamaShape(width=4096, depth=32, num_heads=32, num_kv_heads=8, mlp_width=14336, vocabulary=128256),
    "llama-70b": LlamaShape(width=8192, depth=80, num_heads=64, num_kv_heads=8, mlp_width=28672, vocabulary=128256),
}

# What `train --model llama` trains, on bytes: 1,214,080 parameters.
BYTE_LLAMA = LlamaShape(
    width=128, depth=6, num_heads=4, num_kv_heads=2, mlp_width=384, vocabulary=256, context=128, tied=True,
    rope_base=10_000.0,
)  # fmt: skip


# model_type in a `config.json` -> the family's title, and the tokens of a sequence if the file does not say
RELATIVES = {
    "llama": ("Llama", 2048),
    "mistral": ("Mistral", 131_072),
    "qwen2": ("Qwen2", 32_768),
    "qwen3": ("Qwen3", 32_768),
}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def shape_from_config(config: dict) -> LlamaShape:
    """Return the shape that a Hugging Face `config.json` of a Llama, or of one of its RELATIVES, describes.

    Keys that are left out have the defaults of the models' own configurations. Raises ValueError for other kinds of
    models, and for a size that is missing.
    """
    kind = config.get("model_type")
    if kind not in RELATIVES:
        raise ValueError(f"model_type {kind!r} is not one of {', '.join(RELATIVES)}")
    if missing := [key for key in _NEEDED if not isinstance(config.get(key), int)]:
        raise ValueError(f"no whole number {', '.join(missing)}, which the size of the model depends on")
    num_heads, width, head_size = config["num_attention_heads"], config["hidden_size"], config.get("head_dim")
    rope, rope_type = rope_of_config(config)
    attention_bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        width=width,
        depth=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        mlp_width=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=config.get("max_position_embeddings") or RELATIVES[kind][1],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_base=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        rope_scaling=_read_scaling(rope) if rope_type == "llama3" else None,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        head_size=None if head_size == width // num_heads else head_size,
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=kind != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def rope_of_config(config: dict) -> tuple[dict, str]:
    """Return what a `config.json` says of rotary positions, under its newer or its older name, and their type."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope, rope.get("rope_type", rope.get("type", "default"))


def llama_from_config(config: dict) -> LlamaShape:
    """Return the shape of a model that `fsdp_helpers.models.llama` can build from a Hugging Face `config.json`.

    Raises ValueError, naming the key, for what this model does not have: biases, other activations, positions that
    are scaled in a different way than Llama 3.1's.
    """
    _, rope_type = rope_of_config(config)
    refused = {
        "model_type": config.get("model_type") != "llama",
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "rope_type": rope_type not in ("default", "llama3"),
    }
    for key, is_refused in refused.items():
        if is_refused:
            found = rope_type if key == "rope_type" else config.get(key)
            raise ValueError(f"this config.json has {key} {found!r}, which a plain Llama does not have")
    shape = shape_from_config(config)
    if shape.q_width != shape.width:
        raise ValueError(f"head_dim {shape.head_width} x {shape.num_heads} heads is not the hidden_size {shape.width}")
    return shape


def _read_scaling(rope: dict) -> RopeScaling:
    if missing := [key for key in _SCALING if key not in rope]:
        raise ValueError(f"rope_type llama3 without {', '.join(missing)}")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )


def _scaling_of(shape: LlamaShape) -> dict:
    scaling = shape.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }


def config_of_llama(shape: LlamaShape) -> dict:
    """Return what Hugging Face's `config.json` says of a model of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.mlp_width,
        "hidden_act": "silu",
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_base,
        "rope_parameters": {"rope_theta": shape.rope_base} | _scaling_of(shape),
        "rms_norm_eps": shape.norm_eps,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
