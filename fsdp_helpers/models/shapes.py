"""The numbers that determine a transformer's size, from which models are built and plans are computed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ViTShape:
    """A vision transformer: patches, an optional class token, identical blocks, a norm and a head."""

    image_size: int  # images are square
    channels: int
    patch_size: int
    width: int  # of a token
    depth: int  # blocks
    num_heads: int
    mlp_width: int  # of a block's hidden layer
    num_classes: int
    class_token: bool = False  # if False, the head gets the mean over all tokens

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
    """Llama 3.1's settings for stretching rotary positions to contexts longer than those in its first training phase.

    A pair of values that rotates fewer than `low_freq_factor` times within `original_context` rotates `factor` times
    more slowly; one that rotates more than `high_freq_factor` times doesn't change; in between, the change is gradual.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A block's experts: MLPs, of which a router picks a few for each token (Shazeer et al. 2017, arXiv:1701.06538)."""

    number: int
    chosen: int  # experts for each token
    width: int  # of one expert's hidden layer
    shared_width: int = 0  # of the hidden layer of the expert that every token also goes through; 0 if there is none
    shared_gate: bool = False  # the shared expert's output is scaled by a gate, one number per token
    router_bias: bool = False
    biases: bool = False  # the experts' matrices have biases
    dense: frozenset[int] = frozenset()  # blocks that have an ordinary MLP instead of experts


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention: queries, keys and values pass through narrow vectors (DeepSeek-V2, arXiv:2405.04434)."""

    query_rank: int | None  # width of a token's latent query; None if queries come straight from the token
    kv_rank: int
    content_width: int  # of the part of a head's query and key without positions
    rotary_width: int  # of the part with positions; all heads share one such key
    value_width: int  # of a head's value


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama-like language model: grouped-query attention, rotary positions, SwiGLU, RMSNorm."""

    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    vocabulary: int
    context: int = 8192  # tokens in a sequence
    tied: bool = False  # the head shares the embedding's matrix
    rope_base: float = 500_000.0  # of the rotary positions' wavelengths
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    # Only for Llama's relatives, which we plan but don't build
    head_size: int | None = None  # width of one head, if it isn't width / num_heads
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    qk_norm: bool = False  # each head's queries and keys are normalized
    gated: bool = True  # if False, an MLP has two matrices and no gate, like GPT-2's
    norm_bias: bool = False  # LayerNorm instead of RMSNorm
    num_norms: int = 2  # in a block; Gemma has two more, after attention and after the MLP
    positions: int = 0  # rows of a table of learned positions
    sinks: bool = False  # a trained number per head, which attention can attend to instead of a token
    softcap: bool = False  # the head's logits go through a tanh
    window: int | None = None  # the number of tokens that attention sees in blocks with a sliding window
    full_every: int = 0  # every n-th block sees the full context instead; 0 means that no block does
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def head_width(self) -> int:
        return self.head_size or self.width // self.num_heads

    def is_routed(self, block: int) -> bool:
        """Return True if `block` has experts."""
        return self.experts is not None and block not in self.experts.dense

    def seen_tokens(self, block: int) -> int:
        """Return the number of tokens that attention sees in `block`, ignoring the causal mask."""
        has_window = self.window is not None and not (self.full_every and (block + 1) % self.full_every == 0)
        return min(self.context, self.window) if has_window else self.context

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

# model_type in a `config.json` -> the family's name, and the tokens in a sequence if the file doesn't specify them
RELATIVES = {
    "llama": ("Llama", 2048),
    "mistral": ("Mistral", 131_072),
    "qwen2": ("Qwen2", 32_768),
    "qwen3": ("Qwen3", 32_768),
}
# Defaults of the models' own configurations, if the file doesn't specify them: the size of a head, and key/value heads
HEAD_SIZES, KV_HEADS = {"qwen3": 128}, {"mistral": 8, "qwen2": 32, "qwen3": 32}
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
RELEASED_IN = ("mxfp4", "fp8")  # formats of published files; the models themselves are trained in bf16
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def shape_from_config(config: dict) -> LlamaShape:
    """Return the shape described by a Hugging Face `config.json` for a Llama or one of its RELATIVES.

    Missing keys get the defaults of the models' own configurations. Raises ValueError for other kinds of models, and if
    a size is missing.
    """
    kind = config.get("model_type")
    if kind not in RELATIVES:
        raise ValueError(f"model_type {kind!r} isn't one of {', '.join(RELATIVES)}")
    require_sizes(config, _NEEDED)
    num_heads, width = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or HEAD_SIZES.get(kind)
    check_config(config, num_heads=num_heads, width=width, head_size=head_size)
    rope, rope_type = rope_of_config(config)
    attention_bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        width=width,
        depth=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", KV_HEADS.get(kind)) or num_heads,
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


def require_sizes(config: dict, keys: Sequence[str]) -> None:
    """Raise ValueError unless each of `keys` has a positive whole number; the message names the keys."""
    if missing := [key for key in keys if not isinstance(config.get(key), int) or isinstance(config[key], bool)]:
        raise ValueError(f"no whole number for {', '.join(missing)}; the model's size depends on it")
    if wrong := [key for key in keys if config[key] < 1]:
        raise ValueError(f"{wrong[0]} is {config[wrong[0]]}; it must be 1 or more")


def check_config(config: dict, *, num_heads: int, width: int, head_size: int | None) -> None:
    """Raise ValueError if the numbers of heads don't divide evenly, or for unexpected experts or quantized weights."""
    if not head_size and width % num_heads:
        raise ValueError(
            f"num_attention_heads {num_heads} doesn't divide hidden_size {width}, and head_dim isn't given"
        )
    num_kv_heads = config.get("num_key_value_heads", KV_HEADS.get(config.get("model_type")))
    if num_kv_heads is not None and (not isinstance(num_kv_heads, int) or num_kv_heads < 1 or num_heads % num_kv_heads):
        raise ValueError(f"num_key_value_heads {num_kv_heads!r} doesn't divide num_attention_heads {num_heads}")
    if found := [key for key in EXPERT_KEYS if isinstance(config.get(key), int) and config[key] > 1]:
        kind = config.get("model_type")
        if kind in RELATIVES:
            raise ValueError(f"{found[0]} is {config[found[0]]}, but model_type {kind!r} has no experts")
    check_quantization(config)


def check_quantization(config: dict) -> None:
    """Raise ValueError if the model's files contain quantized weights, which can't be trained directly."""
    how = config.get("quantization_config")
    if how and (not isinstance(how, dict) or how.get("quant_method") not in RELEASED_IN):
        method = how.get("quant_method", "unknown") if isinstance(how, dict) else how
        raise ValueError(
            f"quantization_config {method!r}: weights quantized to 4 or 8 bits can't be trained, so there's no plan for "
            f"them; give the config.json of the unquantized model"
        )


def rope_of_config(config: dict) -> tuple[dict, str]:
    """Return the rotary settings in a `config.json`, under their newer or older key, and their type.

    Raises ValueError if the settings aren't a JSON object.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling is {rope!r}; it must be a JSON object with a rope_type")
    return rope, rope.get("rope_type", rope.get("type", "default"))


def llama_from_config(config: dict) -> LlamaShape:
    """Return the shape of a model that `fsdp_helpers.models.llama` can build from a Hugging Face `config.json`.

    Raises ValueError, naming the key, for features that our model doesn't have: biases, other activation functions,
    and position scaling other than Llama 3.1's.
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
            raise ValueError(f"this config.json has {key} {found!r}, which a plain Llama doesn't have")
    shape = shape_from_config(config)
    if shape.q_width != shape.width:
        raise ValueError(f"head_dim {shape.head_width} x {shape.num_heads} heads isn't the hidden_size, {shape.width}")
    return shape


def _read_scaling(rope: dict) -> RopeScaling:
    if missing := [key for key in _SCALING if key not in rope]:
        raise ValueError(f"rope_type llama3 also needs {', '.join(missing)}")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )
