"""A folder in Hugging Face's layout, written and read as other programs do; and the one that 13 comes with."""

import json
from pathlib import Path

import torch
from leftovers import PROJECT
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_helpers.models.shapes import LlamaShape, llama_from_config

KEPT = PROJECT / "notebooks" / "reference" / "language"  # 13's model


def read_config(folder: str | Path) -> dict:
    return json.loads(Path(folder, "config.json").read_text())


def kept_shape() -> LlamaShape:
    return llama_from_config(read_config(KEPT))


def save_hugging_face(model: nn.Module, folder: Path, config: dict, *, num_files: int = 3) -> None:
    """Write a new folder; a tensor with two names is in the files under its first."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    file_of = {
        name: f"model-{1 + number * num_files // len(tensors):05}-of-{num_files:05}.safetensors"
        for number, name in enumerate(tensors)
    }
    folder.mkdir(parents=True)
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, folder / file)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def load_hugging_face(model: nn.Module, folder: str | Path) -> None:
    """Fill the model from the folder's files, which have its tensors and no others."""
    values = {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}
    assert values.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def config_of_llama(shape: LlamaShape) -> dict:
    """Return a Hugging Face `config.json` for a model of this shape."""
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
